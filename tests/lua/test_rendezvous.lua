local keys = require "llmops.keys"
local rendezvous = require "llmops.rendezvous"

local T = {}

local function backends(count, weight)
  local list = {}
  for i = 1, count do
    local id = ("machine%d:8000"):format(i)
    list[i] = { key = id, id = id, seed = rendezvous.seed(id), weight = weight or 1, available = true }
  end
  return list
end

local function homes(list, sessions, tried)
  local result, counts = {}, {}
  for i = 1, sessions do
    local high, low = keys.hash("session-" .. i)
    local best = rendezvous.best(high, low, list, "available", tried)
    result[i] = best.id
    counts[best.id] = (counts[best.id] or 0) + 1
  end
  return result, counts
end

function T.spreads_evenly()
  local _, counts = homes(backends(16), 16000)
  local squares = 0
  for i = 1, 16 do
    squares = squares + ((counts[("machine%d:8000"):format(i)] or 0) - 1000) ^ 2 / 1000
  end
  assert(squares < 37.7, "chi squared with 15 degrees of freedom is " .. squares) -- 0.1 % point
end

function T.similar_keys_are_independent()
  local list, counts = backends(16), {}
  for i = 1, 40 do
    local high, low = keys.hash(("user-%02d"):format(i))
    counts[rendezvous.best(high, low, list, "available").id] = true
  end
  local used = 0
  for _ in pairs(counts) do
    used = used + 1
  end
  assert(used >= 12, used)
end

function T.growth_moves_only_to_the_new_and_no_more_than_its_share()
  local before = homes(backends(12), 12000)
  local after = homes(backends(16), 12000)
  local moved = 0
  for i = 1, #before do
    if before[i] ~= after[i] then
      moved = moved + 1
      assert(tonumber(after[i]:match("%d+")) > 12, after[i])
    end
  end
  assert(moved > 0.22 * 12000 and moved < 0.28 * 12000, moved)
end

function T.a_lost_backend_moves_exactly_its_own_and_evenly()
  local list = backends(5)
  local before = homes(list, 5000)
  list[2].available = false
  local after, counts = homes(list, 5000)
  for i = 1, #before do
    assert((before[i] == after[i]) == (before[i] ~= "machine2:8000"))
  end
  for _, id in ipairs { "machine1:8000", "machine3:8000", "machine4:8000", "machine5:8000" } do
    assert(counts[id] > 1100 and counts[id] < 1400, counts[id])
  end
end

function T.a_tried_backend_is_not_chosen_again()
  local list = backends(2)
  local high, low = keys.hash("x")
  local first = rendezvous.best(high, low, list, "available")
  local second = rendezvous.best(high, low, list, "available", { [first.key] = true })
  assert(second and second ~= first)
  assert(not rendezvous.best(high, low, list, "available", { [first.key] = true, [second.key] = true }))
end

function T.weights_count()
  local list = backends(2)
  list[2].weight = 3
  local _, counts = homes(list, 8000)
  assert(counts["machine2:8000"] > 5800 and counts["machine2:8000"] < 6200, counts["machine2:8000"])
end

function T.order_of_backends_does_not_matter()
  local list = backends(8)
  local before = homes(list, 200)
  table.sort(list, function(a, b) return a.id > b.id end)
  local after = homes(list, 200)
  for i = 1, 200 do
    assert(before[i] == after[i])
  end
end

--- Balancers of a pair agree, and so do releases: a changed hash would move every session.
function T.the_hash_does_not_change()
  local high, low, digits = keys.hash("session-1")
  assert(digits == "c7af2d35", digits)
  local draw = rendezvous.draw(high, low, { seed = rendezvous.seed("machine66:8000"), weight = 1 })
  assert(math.abs(draw - 4.170819281192) < 1e-9, draw) -- computed apart, in Python
end

return T
