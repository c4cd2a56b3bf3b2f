-- Health of a DisaggregatedInference for Argo CD: from the conditions that its operator writes.
-- Argo CD runs this without Lua's string and math libraries.

local function health(status, message)
  return { status = status, message = message }
end

local generation = obj.metadata ~= nil and obj.metadata.generation or nil
local status = obj.status

-- The schema gives a new resource the observed generation -1, so that nobody takes it for served before it was seen.
if status == nil or status.conditions == nil then
  return health("Progressing", "Waiting for the kvloop operator to see the resource")
end
if status.observedGeneration ~= generation then
  return health("Progressing", "Waiting for the kvloop operator to see the resource's newest generation")
end

local conditions = {}
for _, condition in ipairs(status.conditions) do
  conditions[condition.type] = condition
end

local function is_true(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end

local function told(kind)
  local condition = conditions[kind]
  if condition.message == nil or condition.message == "" then
    return condition.reason
  end
  return condition.reason .. ": " .. condition.message
end

-- Waiting does not help.
if is_true("Stalled") then
  return health("Degraded", told("Stalled"))
end
if is_true("Paused") then
  return health("Suspended", told("Paused"))
end
-- Waiting helps. It may serve meanwhile: Ready says that.
if is_true("Reconciling") then
  return health("Progressing", told("Reconciling"))
end

local ready = conditions["Ready"]
if ready == nil then
  return health("Progressing", "Waiting for the kvloop operator to report the condition Ready")
end
if ready.status == "False" then
  return health("Degraded", told("Ready"))
end
if ready.status ~= "True" then
  return health("Progressing", told("Ready"))
end
if ready.reason == "Suspended" then
  return health("Suspended", told("Ready"))
end
-- It serves, by fewer engines or more slowly than it should.
if is_true("Degraded") then
  return health("Healthy", told("Degraded"))
end
return health("Healthy", told("Ready"))
