--- Who is alive: one worker asks every backend's /health; failed requests of clients count as failed answers too.
-- `fall` failures in a row take a backend out, `rise` good answers bring it back.

local membership = require "llmops.membership"
local settings = require "llmops.settings"

local M = {}

local state = ngx.shared.llmops_state
local probing = {} -- keys whose answer is still awaited: a slow one never delays the others

--- Counts a failure of a backend; takes it out when it was one too many.
function M.failed(key, reason)
  state:delete("successes:" .. key)
  local failures = state:incr("failures:" .. key, 1, 0)
  if failures >= settings.health.fall and not state:get("down:" .. key) then
    state:set("down:" .. key, reason)
    state:incr("version", 1, 0)
    ngx.log(ngx.WARN, "backend ", key, " is down: ", reason)
  end
end

--- Counts a good answer; brings the backend back when it was enough.
function M.answered(key)
  state:delete("failures:" .. key)
  if not state:get("down:" .. key) then
    return
  end
  local successes = state:incr("successes:" .. key, 1, 0)
  if successes >= settings.health.rise then
    state:delete("successes:" .. key)
    state:delete("down:" .. key)
    state:incr("version", 1, 0)
    ngx.log(ngx.WARN, "backend ", key, " is up")
  end
end

--- Why a backend is down, or nil.
function M.down(key)
  return state:get("down:" .. key)
end

local function ask(backend)
  local socket = ngx.socket.tcp()
  local health = settings.health
  socket:settimeouts(health.connect_timeout_s * 1000, health.connect_timeout_s * 1000, health.read_timeout_s * 1000)
  local host = backend.address:find(":", 1, true) and ("[" .. backend.address .. "]") or backend.address
  local ok, err = socket:connect(host, backend.port)
  if not ok then
    return nil, "cannot connect: " .. err
  end
  local line
  ok, err = socket:send(("GET /health HTTP/1.1\r\nHost: %s:%d\r\nConnection: close\r\n\r\n"):format(host, backend.port))
  if ok then
    line, err = socket:receive("*l")
  end
  socket:close()
  local status = line and line:match("^HTTP/1%.[01] (%d%d%d)")
  if status == "200" then
    return true
  end
  return nil, "/health: " .. (status or err or "no HTTP")
end

local function probe(key, backend)
  local called, ok, err = pcall(ask, backend)
  probing[key] = nil
  if called and ok then
    M.answered(key)
  else
    M.failed(key, called and err or ok)
  end
end

--- Asks every backend that is not being asked already; returns at once.
function M.tick()
  for key, backend in pairs(membership.all()) do
    if not probing[key] then
      probing[key] = true
      ngx.thread.spawn(probe, key, backend)
    end
  end
end

return M
