--- Answers the balancer gives itself.

local json = require "cjson.safe"
local view = require "llmops.view"

local M = {}

--- Sends a JSON answer and ends the request.
function M.answer(status, body)
  ngx.status = status
  ngx.header["Content-Type"] = "application/json"
  ngx.print(json.encode(body), "\n")
  return ngx.exit(ngx.HTTP_OK)
end

--- Refuses a request in the shape OpenAI's clients understand.
function M.refuse(status, message)
  if status == 503 then
    ngx.header["Retry-After"] = "1"
  end
  return M.answer(status, { error = { message = message, type = "load_balancer", code = status } })
end

--- What /health says of a service: the truth. {status: ok | degraded | down, service, backends: {total, active, down,
-- draining}}; degraded when a backend is down.
function M.summary(service)
  local counts = { total = service.total, active = service.available, down = 0, draining = 0 }
  for _, backend in ipairs(service.backends) do
    if backend.drained_since then
      counts.draining = counts.draining + 1
    elseif backend.down then
      counts.down = counts.down + 1
    end
  end
  local status = counts.active == 0 and "down" or counts.down > 0 and "degraded" or "ok"
  return { status = status, service = service.name, backends = counts }
end

--- GET /health of a service: 200 while any backend is active, else 503.
function M.health(name)
  local summary = M.summary(view.service(name))
  return M.answer(summary.backends.active > 0 and 200 or 503, summary)
end

return M
