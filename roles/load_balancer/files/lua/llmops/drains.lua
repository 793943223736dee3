--- Backends taken out on purpose. Drains belong to the balancer, not to the backend files: they are kept on disk, and
-- survive reload and restart until somebody activates the backend or it leaves the membership.

local files = require "llmops.files"
local json = require "cjson.safe"

local M = {}

local state = ngx.shared.llmops_state

local function all()
  return json.decode(state:get("drains") or "{}")
end

local function store(drains)
  state:set("drains", json.encode(drains))
  state:incr("version", 1, 0)
  local ok, err = files.replace(M.path, json.encode { schema = 1, drains = drains })
  state:set("drains_error", not ok and err or nil)
  if not ok then
    ngx.log(ngx.ERR, "drains are not persisted: ", err)
  end
  return ok, err
end

--- Reads the persisted drains once per life of the shared memory, in the master before any worker serves.
function M.load(path)
  M.path = path
  if state:get("drains") then
    return
  end
  local text = files.read(path)
  local persisted = text and json.decode(text)
  if text and not (type(persisted) == "table" and type(persisted.drains) == "table") then
    state:set("drains_error", path .. " is not readable as JSON; every backend counts as active")
    ngx.log(ngx.ERR, state:get("drains_error"))
  end
  state:set("drains", json.encode(persisted and persisted.drains or {}))
end

--- {backend key: {since = seconds since 1970, by = who drained it}}; and what ails their file, or nil.
function M.all()
  return all(), state:get("drains_error")
end

--- Runs change(drains) under a lock over all workers, where it can look before it writes; persists the table when
-- change returns true. Returns what change returned second and third, or nil and an error.
function M.update(change)
  local patience = 200
  while not state:add("drains_lock", true, 5) do
    patience = patience - 1
    if patience == 0 then
      return nil, "the drains are locked by another request"
    end
    ngx.sleep(0.01)
  end
  local drains = all()
  local called, changed, result, err = pcall(change, drains)
  local stored, store_error = true, nil
  if called and changed then
    stored, store_error = store(drains)
  end
  state:delete("drains_lock")
  if not called then
    return nil, changed
  end
  if not stored then
    return nil, store_error
  end
  return result, err
end

--- Forgets drains of backends that are no members any more.
function M.keep_only(members)
  local function is_stale(drains)
    for key in pairs(drains) do
      if not members[key] then
        return true
      end
    end
  end
  if is_stale(all()) then
    M.update(function(drains)
      for key in pairs(drains) do
        if not members[key] then
          drains[key] = nil
        end
      end
      return true
    end)
  end
end

return M
