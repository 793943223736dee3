--- JSON over the root-only socket: GET /status, POST /drain, POST /activate.
-- The last two take {"service": name, "ids": [...], "max_unavailable": n, "by": who} and answer with the ids they
-- changed.
-- A drain belongs to who made it: an activation that says "by" ends only drains of that one.

local drains = require "llmops.drains"
local edge = require "llmops.edge"
local files = require "llmops.files"
local in_flight = require "llmops.in_flight"
local json = require "cjson.safe"
local membership = require "llmops.membership"
local settings = require "llmops.settings"
local view = require "llmops.view"

local M = {}

--- One word for a backend: active, down, draining (requests still running) or drained.
function M.state(backend, running)
  if backend.drained_since then
    return running > 0 and "draining" or "drained"
  end
  return backend.down and "down" or "active"
end

local function describe(service, totals)
  local backends = {}
  for _, backend in ipairs(service.backends) do
    local running = totals[backend.key] or 0
    backends[backend.id] = {
      id = backend.id, cluster = backend.cluster, machine = backend.machine, instance = backend.instance,
      address = backend.address, port = backend.port, model = backend.model, weight = backend.weight,
      state = M.state(backend, running), reason = backend.down, in_flight = running,
      drained_since = backend.drained_since, drained_by = backend.drained_by,
    }
  end
  local summary, configured = edge.summary(service), settings.services[service.name]
  return {
    status = summary.status, counts = summary.backends, backends = backends,
    policy = configured.policy, listen_port = configured.listen_port,
  }
end

--- GET /status: {schema, configuration, services: {name: {status, counts, policy, listen_port, backends: {id: {...}}}},
-- files: {name: {error, backends}}, errors: {...}}.
function M.status()
  local totals, services = in_flight.totals(), {}
  for name, service in pairs(view.services()) do
    services[name] = describe(service, totals)
  end
  local reports, directory_error = membership.report()
  local _, drains_error = drains.all()
  return edge.answer(200, {
    schema = 1, configuration = settings.configuration, services = services, files = reports,
    errors = { backends = directory_error, drains = drains_error },
  })
end

--- Why `ids` may not be drained, or nil. What is unavailable already costs nothing more: only a drain that takes an
-- active backend is weighed, together with all others of the service that are down or drained.
function M.objection(service, ids, drained, max_unavailable)
  local wanted, unavailable, takes_active = {}, {}, false
  for _, id in ipairs(ids) do
    wanted[id] = true
  end
  for _, backend in ipairs(service.backends) do
    local out = drained[backend.key] or backend.down
    if wanted[backend.id] then
      takes_active = takes_active or not out
    elseif out then
      unavailable[#unavailable + 1] = backend.id
    end
  end
  if takes_active and #ids + #unavailable > max_unavailable then
    table.sort(unavailable)
    return ("draining %s would make %d backends of service %s unavailable, max_unavailable is %d%s"):format(
      table.concat(ids, ", "), #ids + #unavailable, service.name, max_unavailable,
      #unavailable > 0 and "; already unavailable: " .. table.concat(unavailable, ", ") or "")
  end
end

--- The request's body as a table with a known service and known ids; nil, status and one line otherwise.
local function order()
  ngx.req.read_body()
  local path = ngx.req.get_body_file()
  local wanted = json.decode(ngx.req.get_body_data() or (path and files.read(path)) or "")
  if type(wanted) ~= "table" or type(wanted.ids) ~= "table" then
    return nil, 400, 'the body must be {"service": name, "ids": [...]}'
  end
  if wanted.max_unavailable ~= nil and type(wanted.max_unavailable) ~= "number" then
    return nil, 400, "max_unavailable must be a number"
  end
  if wanted.by ~= nil and type(wanted.by) ~= "string" then
    return nil, 400, "by must be a text"
  end
  local service = view.service(wanted.service)
  if not service then
    return nil, 404, ("service %s is not served here"):format(tostring(wanted.service))
  end
  local known = {}
  for _, backend in ipairs(service.backends) do
    known[backend.id] = true
  end
  for _, id in ipairs(wanted.ids) do
    if not known[id] then
      return nil, 404, ("service %s has no backend %s"):format(wanted.service, tostring(id))
    end
  end
  return wanted, service
end

--- Runs change(drains, key, by) for every id of the request under the drains' lock, after may(drains) had no objection.
local function apply(may, change)
  local wanted, service, message = order()
  if not wanted then
    return edge.refuse(service, message)
  end
  local result, err = drains.update(function(drained)
    local objection = may(service, wanted, drained)
    if objection then
      return false, nil, objection
    end
    local changed = {}
    for _, id in ipairs(wanted.ids) do
      if change(drained, service.name .. "/" .. id, wanted.by) then
        changed[#changed + 1] = id
      end
    end
    return #changed > 0, changed
  end)
  if not result then
    return edge.refuse(409, err)
  end
  return edge.answer(200, { changed = result })
end

--- POST /drain: new requests go elsewhere, running ones finish. 409 when max_unavailable would be exceeded.
function M.drain()
  return apply(function(service, wanted, drained)
    return wanted.max_unavailable and M.objection(service, wanted.ids, drained, wanted.max_unavailable)
  end, function(drained, key, by)
    if not drained[key] then
      drained[key] = { since = ngx.time(), by = by or "operator" }
      return true
    end
  end)
end

--- POST /activate: ends a drain, with "by" only one of that maker.
function M.activate()
  return apply(function() end, function(drained, key, by)
    if drained[key] and (by == nil or by == drained[key].by) then
      drained[key] = nil
      return true
    end
  end)
end

return M
