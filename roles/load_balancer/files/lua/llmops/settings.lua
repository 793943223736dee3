--- What the role wrote for this balancer: services.json beside nginx.conf, read once when nginx starts or reloads.
-- A wrong file is an error here, so that a bad configuration dies as a candidate and never replaces a running one.

local files = require "llmops.files"
local json = require "cjson.safe"

local M = {}

local POLICIES = { session = true }

local function number(settings, section, name)
  local value = settings[section] and settings[section][name]
  if type(value) ~= "number" or value <= 0 then
    error(("services.json: %s.%s must be a number above 0, not %s"):format(section, name, tostring(value)), 0)
  end
end

--- Checks decoded settings; raises one line on the first fault.
function M.check(settings)
  if type(settings) ~= "table" or settings.schema ~= 1 then
    error("services.json: schema must be 1", 0)
  end
  if type(settings.services) ~= "table" or not next(settings.services) then
    error("services.json: services is empty", 0)
  end
  for name, service in pairs(settings.services) do
    if not POLICIES[service.policy] then
      error(("services.json: service %s has the policy '%s'; this balancer knows: session"):format(
        name, tostring(service.policy)), 0)
    end
  end
  for _, name in ipairs { "interval_s", "connect_timeout_s", "read_timeout_s", "fall", "rise" } do
    number(settings, "health", name)
  end
  for _, name in ipairs { "connect_timeout_s", "read_timeout_s", "more_tries" } do
    number(settings, "proxy", name)
  end
  if type(settings.session_headers) ~= "table" then
    error("services.json: session_headers must be a list", 0)
  end
  return settings
end

--- Reads settings and the fingerprint of the configuration directory `prefix` into this module.
function M.load(prefix)
  local text = assert(files.read(prefix .. "services.json"))
  for key, value in pairs(M.check(json.decode(text))) do
    M[key] = value
  end
  M.configuration = (files.read(prefix .. "fingerprint") or ""):match("%x+") or ""
end

return M
