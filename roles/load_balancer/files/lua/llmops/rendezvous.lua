--- Weighted rendezvous hashing (highest random weight): every backend draws a number from the session's key,
-- the highest draw wins. A new backend takes sessions only for itself, a lost one gives away only its own, and any
-- two balancers agree without talking. Weights as in Schindelhauer and Schomaker: the draw is -weight / ln(u).

local bit = require "bit"
local band, bxor, lshift, rshift, tobit = bit.band, bit.bxor, bit.lshift, bit.rshift, bit.tobit
local log = math.log

local M = {}

--- 32-bit product; the factor is split because a double holds 53 bits.
local function multiply(a, b)
  return tobit(band(a, 0xffff) * b + lshift(tobit(rshift(a, 16) * b), 16))
end

--- MurmurHash3's finaliser: every bit of the word reaches every bit of the result.
local function mix(word)
  word = multiply(bxor(word, rshift(word, 16)), 0x85ebca6b)
  word = multiply(bxor(word, rshift(word, 13)), 0xc2b2ae35)
  return bxor(word, rshift(word, 16))
end

--- The constant a backend takes part with: from its name alone, so that it is the same on every balancer.
function M.seed(name)
  return mix(tobit(ngx.crc32_long(name)))
end

--- One backend's draw for a key; above 0.
function M.draw(high, low, backend)
  local word = mix(bxor(mix(bxor(high, backend.seed)), low))
  return -backend.weight / log((word % 4294967296 + 0.5) / 4294967296)
end

--- The backend with the highest draw among those whose field `among` is true and which are not in `tried`; or nil.
function M.best(high, low, backends, among, tried)
  local best, highest = nil, 0
  for i = 1, #backends do
    local backend = backends[i]
    if backend[among] and not (tried and tried[backend.key]) then
      local draw = M.draw(high, low, backend)
      if draw > highest then
        best, highest = backend, draw
      end
    end
  end
  return best
end

return M
