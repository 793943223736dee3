--- What this worker knows of the services, so that a request costs one look into shared memory: the version.
-- Any change of membership, health or drains raises the version, and the next request builds the view anew.

local drains = require "llmops.drains"
local health = require "llmops.health"
local membership = require "llmops.membership"
local rendezvous = require "llmops.rendezvous"
local settings = require "llmops.settings"

local M = {}

local state = ngx.shared.llmops_state
local services, current = {}, false

local function build()
  local built = {}
  for name in pairs(settings.services) do
    built[name] = { name = name, backends = {}, available = 0, total = 0 }
  end
  local drained = drains.all()
  for key, backend in pairs(membership.all()) do
    local service = built[backend.service]
    if service then
      backend.host = backend.address:find(":", 1, true) and ("[" .. backend.address .. "]") or backend.address
      backend.seed = rendezvous.seed(backend.id)
      backend.down = health.down(key)
      backend.drained_since = drained[key] and drained[key].since
      backend.drained_by = drained[key] and drained[key].by
      backend.undrained = not backend.drained_since
      backend.available = backend.undrained and not backend.down
      service.backends[#service.backends + 1] = backend
      service.total = service.total + 1
      service.available = service.available + (backend.available and 1 or 0)
    end
  end
  return built
end

--- All services by name: {name, total, available, backends: [{key, id, host, port, weight, seed, machine, ...,
-- down: reason or nil, drained_since and drained_by or nil, undrained, available}]}.
function M.services()
  local version = state:get("version")
  if version ~= current then
    services = build()
    current = version
  end
  return services
end

--- One service by name.
function M.service(name)
  return M.services()[name]
end

return M
