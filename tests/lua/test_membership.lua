local membership = require "llmops.membership"

local T = {}

local GOOD = [[{"schema": 1, "cluster": "c", "service": "s", "machine": "m", "backends": [%s]}]]
local BACKEND = [[{"id": "m:8000", "address": "%s", "port": %s, "weight": %s}]]

local function fault(text)
  local file, err = membership.parse(text)
  assert(not file, "was taken: " .. text)
  return err
end

local function backend(address, port, weight)
  return GOOD:format(BACKEND:format(address, port, weight))
end

function T.a_good_file_is_taken()
  local file = assert(membership.parse(backend("10.255.254.66", 8000, 1)))
  assert(file.backends[1].id == "m:8000")
  assert(membership.parse(backend("fd00::66", 8000, 0.5)))
  assert(membership.parse(GOOD:format("")))
end

function T.what_is_not_the_schema_is_refused()
  assert(fault("{"):find("not JSON"))
  assert(fault("[]"):find("schema"))
  assert(fault("7"):find("schema"))
  assert(fault('{"schema": 2}'):find("schema"))
  assert(fault('{"schema": 1, "cluster": "c", "service": "s"}'):find("machine"))
  assert(fault('{"schema": 1, "cluster": "c", "service": "s", "machine": "m"}'):find("backends"))
  assert(fault(GOOD:format("7")):find("object"))
  assert(fault(GOOD:format('{"id": ""}')):find("id"))
end

function T.values_are_checked()
  for _, address in ipairs { "localhost", "10.0.0", "10.0.0.256", "", "10.0.0.1; evil" } do
    assert(fault(backend(address, 8000, 1)):find("address", 1, true), address)
  end
  for _, port in ipairs { "0", "65536", "80.5", '"8000"' } do
    assert(fault(backend("10.0.0.1", port, 1)):find("port", 1, true), port)
  end
  for _, weight in ipairs { "0", "-1", '"heavy"' } do
    assert(fault(backend("10.0.0.1", 8000, weight)):find("weight", 1, true), weight)
  end
end

function T.an_id_stands_there_once()
  local one = BACKEND:format("10.0.0.1", 8000, 1)
  assert(fault(GOOD:format(one .. "," .. one)):find("twice"))
end

return T
