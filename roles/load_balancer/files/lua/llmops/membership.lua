--- Which backends there are: what the backend files say, one file per (cluster, service, machine).
-- One worker re-reads the files and publishes them to all; a bad file keeps its last good text and is reported.

local files = require "llmops.files"
local json = require "cjson.safe"
local settings = require "llmops.settings"

local M = {}

local state = ngx.shared.llmops_state

local function is_name(value)
  return type(value) == "string" and value ~= "" and #value <= 200 and not value:find("[%c%s]")
end

--- nginx wants addresses, never names: it would not resolve them.
local function is_address(value)
  if type(value) ~= "string" then
    return false
  end
  local numbers = { value:match("^(%d+)%.(%d+)%.(%d+)%.(%d+)$") }
  for _, number in ipairs(numbers) do
    if tonumber(number) > 255 then
      return false
    end
  end
  return #numbers == 4 or (value:find(":", 1, true) and value:match("^[%x:.]+$")) ~= nil
end

local function is_whole(value, low, high)
  return type(value) == "number" and value >= low and value <= high and value % 1 == 0
end

local function check_backend(backend)
  if type(backend) ~= "table" then
    return "a backend is not an object"
  end
  if not is_name(backend.id) then
    return "a backend has no id"
  end
  if not is_address(backend.address) then
    return ("backend %s: address '%s' is not an IP address"):format(backend.id, tostring(backend.address))
  end
  if not is_whole(backend.port, 1, 65535) then
    return ("backend %s: port '%s' is not one of 1 to 65535"):format(backend.id, tostring(backend.port))
  end
  if backend.weight ~= nil and not (type(backend.weight) == "number" and backend.weight > 0) then
    return ("backend %s: weight '%s' is not above 0"):format(backend.id, tostring(backend.weight))
  end
end

--- The content of a backend file; nil and one line when it breaks the schema.
function M.parse(text)
  local file, err = json.decode(text)
  if not file then
    return nil, "not JSON: " .. tostring(err)
  end
  if type(file) ~= "table" or file.schema ~= 1 then
    return nil, "schema is not 1"
  end
  for _, field in ipairs { "cluster", "service", "machine" } do
    if not is_name(file[field]) then
      return nil, field .. " is missing"
    end
  end
  if type(file.backends) ~= "table" then
    return nil, "backends is not a list"
  end
  local seen = {}
  for _, backend in ipairs(file.backends) do
    err = check_backend(backend)
    if err then
      return nil, err
    end
    if seen[backend.id] then
      return nil, ("backend %s stands there twice"):format(backend.id)
    end
    seen[backend.id] = true
  end
  return file
end

--- Parses the texts by name; returns contents and reports ({error, backends}) by name. The last good text of a file
-- lives in shared memory, so that it also outlives a reload.
local function parse_all(names, texts)
  local contents, reports = {}, {}
  for _, name in ipairs(names) do
    local file, err = M.parse(texts[name])
    if file then
      state:safe_set("good:" .. name, texts[name])
    else
      ngx.log(ngx.ERR, "backend file ", name, ": ", err)
      local good = state:get("good:" .. name)
      file = good and M.parse(good)
    end
    contents[name] = file
    reports[name] = { error = err, backends = file and #file.backends or 0 }
  end
  return contents, reports
end

--- One flat entry per backend, by key "service/id". Of two files that claim the same id the first by name keeps it.
local function merge(names, contents, reports)
  local members = {}
  for _, name in ipairs(names) do
    local file = contents[name]
    for _, backend in ipairs(file and file.backends or {}) do
      local key = file.service .. "/" .. backend.id
      if members[key] then
        reports[name].error = ("backend %s is already in %s"):format(backend.id, members[key].file)
      else
        members[key] = {
          key = key, id = backend.id, service = file.service, cluster = file.cluster, machine = file.machine,
          file = name, instance = backend.instance, address = backend.address, port = backend.port,
          model = backend.model, weight = backend.weight or 1, max_concurrent = backend.max_concurrent,
        }
      end
    end
  end
  return members
end

local function forget(key)
  for _, prefix in ipairs { "down:", "failures:", "successes:" } do
    state:delete(prefix .. key)
  end
end

local function publish(members, reports)
  local before = M.all()
  for key in pairs(members) do
    if not before[key] and not state:get("booting") then
      state:set("down:" .. key, "has not answered yet")
    end
  end
  for key in pairs(before) do
    if not members[key] then
      forget(key)
    end
  end
  local ok, err = state:safe_set("members", json.encode(members))
  if not ok then
    ngx.log(ngx.ERR, "membership does not fit into shared memory: ", err)
    return
  end
  state:set("reports", json.encode(reports))
  state:incr("version", 1, 0)
end

--- Re-reads the backend files; publishes them when anything changed. An unreadable directory changes nothing.
function M.refresh()
  local names, err = files.list(M.directory, ".json")
  state:set("directory_error", err)
  if not names then
    return
  end
  local texts, lines = {}, {}
  for i, name in ipairs(names) do
    texts[name] = files.read(M.directory .. "/" .. name) or ""
    lines[i] = name .. "\n" .. texts[name]
  end
  local seen = ngx.md5(table.concat(lines, "\n"))
  if seen ~= state:get("files_seen") then
    local contents, reports = parse_all(names, texts)
    publish(merge(names, contents, reports), reports)
    state:set("files_seen", seen)
  end
end

--- Every backend by key.
function M.all()
  return json.decode(state:get("members") or "{}")
end

--- What is to be said about the files: by name {error, backends}, and an error of the directory or nil.
function M.report()
  return json.decode(state:get("reports") or "{}"), state:get("directory_error")
end

--- Whether every file was readable, so that who is missing is known to be gone.
function M.is_whole()
  local reports, directory_error = M.report()
  for _, report in pairs(reports) do
    if report.error then
      return false
    end
  end
  return not directory_error
end

--- First reading, in the master before any worker serves: backends found at a cold start count as up until a probe
-- says otherwise; backends that come later have to answer first.
function M.start(prefix)
  M.directory = settings.backends or (prefix .. "backends")
  if state:add("booted", true) then
    state:set("booting", true)
  end
  M.refresh()
  state:delete("booting")
end

return M
