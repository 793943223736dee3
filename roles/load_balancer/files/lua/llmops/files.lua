--- The little file system access the balancer needs: list, read, replace. Blocking, so only for small files.

local ffi = require "ffi"

local M = {}

-- glibc's 64-bit layout, the same on x86_64 and aarch64 (bits/dirent.h).
ffi.cdef [[
  typedef struct llmops_dir llmops_dir;
  struct llmops_dirent {
    uint64_t inode; int64_t offset; unsigned short length; unsigned char type; char name[256];
  };
  llmops_dir *opendir(const char *path);
  struct llmops_dirent *readdir(llmops_dir *directory);
  int closedir(llmops_dir *directory);
  int fileno(void *stream);
  int fsync(int descriptor);
]]

--- Sorted names in `path` that end in `suffix`, hidden ones left out; nil and an error when it cannot be read.
function M.list(path, suffix)
  local directory = ffi.C.opendir(path)
  if directory == nil then
    return nil, path .. " cannot be read"
  end
  local names = {}
  local entry = ffi.C.readdir(directory)
  while entry ~= nil do
    local name = ffi.string(entry.name)
    if name:sub(1, 1) ~= "." and name:sub(-#suffix) == suffix then
      names[#names + 1] = name
    end
    entry = ffi.C.readdir(directory)
  end
  ffi.C.closedir(directory)
  table.sort(names)
  return names
end

--- The whole text of a file; nil and an error when it cannot be read.
function M.read(path)
  local file, err = io.open(path, "rb")
  if not file then
    return nil, err
  end
  local text
  text, err = file:read("*a")
  file:close()
  if not text then
    return nil, err
  end
  return text
end

--- Replaces a file whole: what is read is the old text or the new, also after a power cut.
function M.replace(path, text)
  local temporary = ("%s.%d"):format(path, ngx.worker.pid())
  local file, err = io.open(temporary, "wb")
  if not file then
    return nil, err
  end
  local ok
  ok, err = file:write(text)
  ok = ok and file:flush() and ffi.C.fsync(ffi.C.fileno(file)) == 0
  file:close()
  if not ok then
    os.remove(temporary)
    return nil, err or (temporary .. " could not be written")
  end
  return os.rename(temporary, path)
end

return M
