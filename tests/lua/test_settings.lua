local json = require "cjson"
local settings = require "llmops.settings"

local T = {}

local function good()
  return {
    schema = 1, services = { s = { listen_port = 1, policy = "session" } }, session_headers = { "X-Session-ID" },
    health = { interval_s = 0.5, connect_timeout_s = 0.4, read_timeout_s = 3, fall = 2, rise = 2 },
    proxy = { connect_timeout_s = 2, read_timeout_s = 3600, more_tries = 2 },
  }
end

local function fault(change)
  local wrong = good()
  change(wrong)
  local ok, err = pcall(settings.check, wrong)
  assert(not ok, "was taken: " .. json.encode(wrong))
  return err
end

function T.good_settings_are_taken()
  assert(settings.check(good()))
end

function T.faults_are_named()
  assert(fault(function(s) s.schema = 2 end):find("schema"))
  assert(fault(function(s) s.services = {} end):find("services"))
  assert(fault(function(s) s.services.s.policy = "least_conn" end):find("the policy 'least_conn'", 1, true))
  assert(fault(function(s) s.health.fall = 0 end):find("health.fall", 1, true))
  assert(fault(function(s) s.proxy = nil end):find("proxy.connect_timeout_s", 1, true))
  assert(fault(function(s) s.session_headers = "X" end):find("session_headers"))
end

return T
