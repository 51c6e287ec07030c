-- Converts a worker's load from the text kept in the load hash, and back. nil: it cannot be read.
local function parse_load(text)
  local tokens, us, head_us, since, blocks, requests, decoding, total, routed_us, routed, out, into =
    string.match(text or '',
      '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
  local l = tokens and {
    tokens = tonumber(tokens), us = tonumber(us),
    head_us = tonumber(head_us), head_since_ms = tonumber(since),
    blocks = tonumber(blocks), requests = tonumber(requests),
    decoding = tonumber(decoding), total = tonumber(total),
    routed_us = tonumber(routed_us), routed_at = tonumber(routed),
    sending_until_ms = tonumber(out), receiving_until_ms = tonumber(into),
  }
  return l and math.max(l.tokens, l.us, l.head_us, l.head_since_ms, l.blocks, l.requests,
    l.decoding, l.total, l.routed_us, l.routed_at, l.sending_until_ms,
    l.receiving_until_ms) < 1e15 and l or nil
end

local function format_load(l)
  return string.format('%d %d %d %d %d %d %d %d %d %d %d %d', l.tokens, l.us, l.head_us,
    l.head_since_ms, l.blocks, l.requests, l.decoding, l.total, l.routed_us, l.routed_at,
    l.sending_until_ms, l.receiving_until_ms)
end
