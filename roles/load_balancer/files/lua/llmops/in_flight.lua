--- Requests in flight per backend. Every worker counts under its own process id, so that what a killed worker can no
-- longer count down is dropped with it.

local ffi = require "ffi"

local M = {}

local counts = ngx.shared.llmops_in_flight

ffi.cdef [[ int kill(int pid, int signal); ]]

--- Counts one request in for a backend key.
function M.enter(key)
  counts:incr(ngx.worker.pid() .. " " .. key, 1, 0)
end

--- Counts it out again.
function M.leave(key)
  counts:incr(ngx.worker.pid() .. " " .. key, -1, 0)
end

--- Requests in flight over all workers, by backend key; a key without any is absent.
function M.totals()
  local totals = {}
  for _, name in ipairs(counts:get_keys(0)) do
    local key = name:match("^%d+ (.*)$")
    local count = counts:get(name) or 0
    if count > 0 then
      totals[key] = (totals[key] or 0) + count
    end
  end
  return totals
end

--- Drops the counts of workers that are gone. A worker that finishes its streams after a reload still lives; a foreign
-- process that got the number of a dead one belongs to another user and cannot be signalled.
function M.reap()
  local alive = {}
  for _, name in ipairs(counts:get_keys(0)) do
    local pid = tonumber(name:match("^%d+"))
    if alive[pid] == nil then
      alive[pid] = ffi.C.kill(pid, 0) == 0
    end
    if not alive[pid] then
      counts:delete(name)
    end
  end
end

return M
