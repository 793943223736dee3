-- The load balancer's Lua runs in nginx: LuaJIT with the ngx API of lua-nginx-module.
std = "ngx_lua"
max_line_length = 120
-- Tests are given a directory of their own.
files["tests/lua"] = { read_globals = { "SCRATCH" } }
