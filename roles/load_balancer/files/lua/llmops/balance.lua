--- The way of one request: access() chooses a backend, balance() hands it to nginx (again after a failure that no
-- client has seen), body() notes the first byte, log() counts it out.

local balancer = require "ngx.balancer"
local edge = require "llmops.edge"
local health = require "llmops.health"
local in_flight = require "llmops.in_flight"
local keys = require "llmops.keys"
local rendezvous = require "llmops.rendezvous"
local settings = require "llmops.settings"
local view = require "llmops.view"

local M = {}

-- NGX_BUSY: nginx then ends the request with 502. Status codes from this phase need a patch that only OpenResty has.
local NO_BACKEND = -3

local variables

--- Derives what does not change between requests; called once settings are loaded.
function M.start()
  variables = keys.variables(settings.session_headers)
end

--- The best backend for the key that was not tried yet. When none is available (panic) any that is not drained is
-- better than a certain refusal: health may be wrong, and the answer says so if it is not.
local function choose(service, ctx)
  return rendezvous.best(ctx.high, ctx.low, service.backends, "available", ctx.tried)
    or rendezvous.best(ctx.high, ctx.low, service.backends, "undrained", ctx.tried)
end

--- Chooses where a request of the named service goes, or refuses it with 503.
function M.access(name)
  local ctx = ngx.ctx
  local service = view.service(name)
  local digits, source
  ctx.high, ctx.low, digits, source = keys.of_request(variables)
  ngx.var.llmops_key, ngx.var.llmops_key_source = digits, source
  ctx.service = service
  ctx.backend = choose(service, ctx)
  if not ctx.backend then
    return edge.refuse(503, ("service %s has no backend in service"):format(name))
  end
end

local function leave(ctx)
  if ctx.counted then
    in_flight.leave(ctx.counted)
    ctx.counted = nil
  end
end

--- After a failed attempt: chooses the next backend, or none. A backend that was silent for the whole read timeout may
-- still be computing: sending the prompt elsewhere would compute it twice.
local function again(ctx)
  local _, status = balancer.get_last_failure()
  leave(ctx)
  local failed = ctx.backend
  ctx.tried[failed.key] = true
  if status == 504 and ngx.now() - ctx.started >= settings.proxy.read_timeout_s then
    ctx.backend = nil
    return
  end
  health.failed(failed.key, status == 503 and "answered 503" or "failed a request: " .. status)
  ctx.backend = choose(ctx.service, ctx)
end

--- Balancer phase, once per attempt.
function M.balance()
  local ctx = ngx.ctx
  if ctx.tried then
    again(ctx)
  else
    ctx.tried = {}
    -- A large body may have taken minutes to arrive: what was chosen before may be drained or gone by now.
    local service = view.service(ctx.service.name)
    if service ~= ctx.service then
      ctx.service = service
      ctx.backend = choose(service, ctx)
    end
    -- Once only: more tries given at a later attempt would add up without end.
    local others = math.min(settings.proxy.more_tries, #ctx.service.backends - 1)
    if others > 0 then
      balancer.set_more_tries(others)
    end
  end
  local backend = ctx.backend
  if not backend then
    return ngx.exit(NO_BACKEND)
  end
  ctx.started = ngx.now()
  local proxy = settings.proxy
  balancer.set_timeouts(proxy.connect_timeout_s, proxy.read_timeout_s, proxy.read_timeout_s)
  local ok, err = balancer.set_current_peer(backend.host, backend.port)
  if not ok then
    ngx.log(ngx.ERR, "backend ", backend.key, ": ", err)
    return ngx.exit(NO_BACKEND)
  end
  in_flight.enter(backend.key)
  ctx.counted = backend.key
end

--- Notes the time to the first byte of the answer's body: vLLM sends its headers before the first token.
function M.body()
  local ctx = ngx.ctx
  if ctx.counted and not ctx.first_byte then
    ctx.first_byte = true
    ngx.var.llmops_ttft = ("%.3f"):format(ngx.now() - ngx.req.start_time())
  end
end

--- Log phase: every request ends here, also one whose client went away.
function M.log()
  leave(ngx.ctx)
end

return M
