--- Where nginx enters: init() in the master (also at every reload), worker() in each worker.

local balance = require "llmops.balance"
local drains = require "llmops.drains"
local health = require "llmops.health"
local in_flight = require "llmops.in_flight"
local membership = require "llmops.membership"
local settings = require "llmops.settings"

local M = {}

--- Loads settings, drains and membership before any worker serves; an error here ends the start or the reload.
function M.init()
  local prefix = ngx.config.prefix()
  settings.load(prefix)
  drains.load(settings.state .. "/drains.json")
  membership.start(prefix)
  balance.start()
end

--- A drain ends with its backend; while a file is unreadable nobody knows which are gone.
local function forget_drains()
  if membership.is_whole() then
    drains.keep_only(membership.all())
  end
end

local function guarded(step)
  local ok, err = pcall(step)
  if not ok then
    ngx.log(ngx.ERR, err)
  end
end

--- Worker 0 keeps membership and health for all. nginx gives a killed worker's number to its successor, and a worker
-- that only finishes its streams after a reload runs no timers any more: there is always exactly one.
function M.worker()
  if ngx.worker.id() ~= 0 then
    return
  end
  local function tick(premature)
    if premature then
      return
    end
    guarded(membership.refresh)
    guarded(forget_drains)
    guarded(in_flight.reap)
    guarded(health.tick)
  end
  ngx.timer.at(0, tick)
  ngx.timer.every(settings.health.interval_s, tick)
end

return M
