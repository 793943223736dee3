--- Runs the tests of the given files inside nginx, where LuaJIT and ngx are the real ones; prints a JSON object of
-- "file.test" to "ok" or the error, and ends nginx.
-- A file returns a table of functions; each gets a clean shared memory.

local json = require "cjson"

return function(directory, files)
  local results = {}
  for _, file in ipairs(files) do
    local tests = dofile(directory .. "/" .. file .. ".lua")
    for name, test in pairs(tests) do
      for _, dictionary in pairs(ngx.shared) do
        dictionary:flush_all()
        dictionary:flush_expired()
      end
      local ok, err = xpcall(test, debug.traceback)
      results[file .. "." .. name] = ok and "ok" or err
    end
  end
  io.stdout:write(json.encode(results), "\n")
  io.stdout:flush()
  os.exit(0)
end
