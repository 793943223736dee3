local admin = require "llmops.admin"
local drains = require "llmops.drains"
local files = require "llmops.files"
local in_flight = require "llmops.in_flight"
local json = require "cjson"

local T = {}

local function path()
  return SCRATCH .. "/drains.json"
end

local function drain(key)
  return drains.update(function(drained)
    drained[key] = 1
    return true, "done"
  end)
end

function T.drains_are_persisted_and_read_again()
  os.remove(path())
  drains.load(path())
  assert(drain("s/a") == "done")
  assert(json.decode(files.read(path())).drains["s/a"] == 1)
  ngx.shared.llmops_state:flush_all()
  drains.load(path())
  assert(drains.all()["s/a"] == 1)
end

function T.an_unreadable_file_is_reported_and_nothing_is_drained()
  files.replace(path(), "{")
  drains.load(path())
  local all, err = drains.all()
  assert(next(all) == nil and err:find(path(), 1, true))
end

function T.a_failing_change_changes_nothing_and_frees_the_lock()
  drains.load(path())
  drain("s/a")
  local result, err = drains.update(function() error("oops") end)
  assert(not result and err:find("oops"))
  assert(drain("s/b") == "done")
  assert(drains.all()["s/a"])
end

function T.drains_of_backends_that_are_gone_are_forgotten()
  drains.load(path())
  drain("s/a")
  drain("s/b")
  drains.keep_only { ["s/b"] = {} }
  assert(not drains.all()["s/a"] and drains.all()["s/b"])
end

function T.objections_weigh_all_that_is_out()
  local service = { name = "s", backends = {
    { id = "a", key = "s/a" }, { id = "b", key = "s/b", down = "refused" }, { id = "c", key = "s/c" },
  } }
  assert(admin.objection(service, { "a" }, {}, 1):find("already unavailable: b", 1, true))
  assert(not admin.objection(service, { "a" }, {}, 2))
  assert(not admin.objection(service, { "b" }, {}, 0))
  assert(admin.objection(service, { "a", "c" }, {}, 2))
  assert(not admin.objection(service, { "a" }, { ["s/a"] = 1 }, 0))
end

function T.states_have_one_word()
  assert(admin.state({}, 3) == "active")
  assert(admin.state({ down = "refused" }, 0) == "down")
  assert(admin.state({ drained_since = 1, down = "refused" }, 0) == "drained")
  assert(admin.state({ drained_since = 1 }, 1) == "draining")
end

function T.counts_of_dead_workers_are_dropped()
  local counts = ngx.shared.llmops_in_flight
  in_flight.enter("s/a")
  counts:set("999999 s/a", 5)
  assert(in_flight.totals()["s/a"] == 6)
  in_flight.reap()
  assert(in_flight.totals()["s/a"] == 1)
  in_flight.leave("s/a")
  assert(in_flight.totals()["s/a"] == nil)
end

return T
