-- One trivial call a request, each with a key and arguments of its own, spread over 64 trajectories.
local threads = {}
function setup(thread)
  thread:set("id", #threads)
  table.insert(threads, thread)
end

local token = os.getenv("AGENTRL_TOKEN")
local sent = 0
function request()
  sent = sent + 1
  local body = string.format(
    '{"calls": [{"trajectory": "load-%d", "key": "%d.%d", "name": "calculator", "arguments": {"expression": "%d*1000+%d"}}]}',
    sent % 64, id, sent, id, sent)
  return wrk.format("POST", "/v1/call", {["Authorization"] = "Bearer " .. token}, body)
end

wrong, said = 0, ""
function response(status, headers, body)
  if status ~= 200 or not body:find('"error": null', 1, true) then
    wrong = wrong + 1
    if said == "" then said = status .. " " .. body:sub(1, 300) end
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  local broken = errors.connect + errors.read + errors.write + errors.timeout
  local all = 0
  for _, thread in ipairs(threads) do
    all = all + thread:get("wrong")
    if thread:get("said") ~= "" then io.write("WRONG " .. thread:get("said"):gsub("\n", " ") .. "\n") end
  end
  io.write(string.format("RESULT %d %d %d %.3f %.3f %.3f\n", summary.requests, summary.duration, broken + all,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000, latency.max / 1000))
end
