-- note_event(kind, subject, text): tells operators of an event. An event that Redis does not take, as
-- when it is full or the key is of another type, is lost.
-- Wants locals: events.
local function note_event(kind, subject, text)
  redis.pcall('XADD', events, 'MAXLEN', '~', 1000, '*',
    'kind', kind, 'subject', subject, 'text', text or '')
end
