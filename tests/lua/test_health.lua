local health = require "llmops.health"
local settings = require "llmops.settings"

local T = {}

settings.health = { fall = 2, rise = 2 }

function T.two_failures_in_a_row_take_out_two_answers_bring_back()
  health.failed("k", "refused")
  assert(not health.down("k"))
  health.answered("k")
  health.failed("k", "refused")
  assert(not health.down("k"), "a good answer between them counts")
  health.failed("k", "timeout")
  assert(health.down("k") == "timeout")
  health.answered("k")
  health.failed("k", "refused")
  health.answered("k")
  assert(health.down("k"), "a failure between them counts")
  health.answered("k")
  assert(not health.down("k"))
end

function T.only_changes_raise_the_version()
  local version = function() return ngx.shared.llmops_state:get("version") end
  health.answered("k")
  health.failed("k", "refused")
  assert(not version())
  health.failed("k", "refused")
  health.failed("k", "refused")
  assert(version() == 1)
end

return T
