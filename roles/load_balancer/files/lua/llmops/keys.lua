--- What makes two requests one session: a session header, else the bearer token, else the client's address.
-- Only a hash of it leaves this module: session ids and tokens are neither stored nor logged.

local M = {}

local bit = require "bit"

--- The value a request is recognised by, and where it came from.
-- @param sessions     values of the session headers in order; nil or "" where absent
-- @param count        how many session headers are configured
-- @param authorization value of the Authorization header or nil
-- @param address      the client's address
function M.choose(sessions, count, authorization, address)
  for i = 1, count do
    if sessions[i] and sessions[i] ~= "" then
      return sessions[i], "session"
    end
  end
  local token = authorization and authorization:match("^[Bb][Ee][Aa][Rr][Ee][Rr]%s+(.*%S)")
  if token then
    return token, "bearer"
  end
  return address, "address"
end

local function word(digest, at)
  local a, b, c, d = digest:byte(at, at + 3)
  return bit.bor(bit.lshift(a, 24), bit.lshift(b, 16), bit.lshift(c, 8), d)
end

--- A key of a value: two signed 32-bit words of its MD5 (spread, not secrecy, is what MD5 is good for here)
-- and eight hexadecimal digits for logs.
function M.hash(value)
  local digest = ngx.md5_bin(value)
  local high, low = word(digest, 1), word(digest, 5)
  return high, low, bit.tohex(high)
end

--- nginx variables that hold the named headers: X-Session-ID is $http_x_session_id.
function M.variables(headers)
  local names = {}
  for i, header in ipairs(headers) do
    names[i] = "http_" .. header:lower():gsub("-", "_")
  end
  return names
end

--- The key of the current request: two words, digits for the log, and the source.
function M.of_request(variables)
  local var, sessions = ngx.var, {}
  for i = 1, #variables do
    sessions[i] = var[variables[i]]
  end
  local value, source = M.choose(sessions, #variables, var.http_authorization, var.remote_addr)
  local high, low, digits = M.hash(value)
  return high, low, digits, source
end

return M
