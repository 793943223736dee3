local keys = require "llmops.keys"

local T = {}

local function source(...)
  local value, from = keys.choose(...)
  return from .. "=" .. value
end

function T.session_wins_over_token_and_address()
  assert(source({ "s" }, 1, "Bearer t", "10.0.0.1") == "session=s")
  assert(source({ nil }, 1, "Bearer t", "10.0.0.1") == "bearer=t")
  assert(source({ nil }, 1, nil, "10.0.0.1") == "address=10.0.0.1")
end

function T.the_first_header_that_is_present_counts()
  assert(source({ nil, "b", "c" }, 3, nil, "a") == "session=b")
  assert(source({ "", "b" }, 2, nil, "a") == "session=b")
end

function T.bearer_is_read_as_http_says()
  assert(source({}, 0, "bearer  SK-1@a ", "a") == "bearer=SK-1@a")
  assert(source({}, 0, "Basic dXNlcg==", "a") == "address=a")
  assert(source({}, 0, "Bearer ", "a") == "address=a")
end

function T.headers_become_variables()
  local variables = keys.variables { "X-Session-ID", "x-claude-code-session-id" }
  assert(variables[1] == "http_x_session_id" and variables[2] == "http_x_claude_code_session_id")
  assert(#variables == 2)
end

function T.hashes_show_nothing_of_the_value()
  local _, _, digits = keys.hash("SK-12345678-@aaa")
  assert(digits:match("^%x%x%x%x%x%x%x%x$"))
end

return T
