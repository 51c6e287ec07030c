// OpenAI's client for Node: with_openai.mjs URL MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const parameters = { type: "object", properties: { place: { type: "string" } }, required: ["place"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const Place = z.object({ place: z.string(), rainy: z.boolean() });

const whole = await client.chat.completions.create({ model, messages });
let text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
  text += chunk.choices[0].delta.content;
}
assert.equal(text, whole.choices[0].message.content);

const called = await client.chat.completions.create({ model, messages, tools });
assert.equal(called.choices[0].finish_reason, "tool_calls");
const runner = client.chat.completions.runTools({
  model,
  messages,
  tools: [{ type: "function", function: { name: "weather", parameters, parse: JSON.parse, function: () => "sunny" } }],
});
assert.ok(await runner.finalContent());

const response_format = zodResponseFormat(Place, "place");
const parsed = await client.chat.completions.parse({ model, messages, response_format });
assert.equal(typeof parsed.choices[0].message.parsed.place, "string");

const response = await client.responses.create({ model, input: "hello" });
const stream = client.responses.stream({ model, input: "hello" });
assert.equal((await stream.finalResponse()).output_text, response.output_text);
const formed = await client.responses.parse({
  model,
  input: "Where?",
  text: { format: zodTextFormat(Place, "place") },
});
assert.equal(typeof formed.output_parsed.rainy, "boolean");

const { data } = await client.embeddings.create({ model, input: ["a", "b"] });
assert.notDeepEqual(data[0].embedding, data[1].embedding);
await assert.rejects(
  client.chat.completions.create({ model, messages, logprobs: true }),
  (error) => error.status === 400 && error.param === "logprobs",
);
