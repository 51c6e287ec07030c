// Vercel's AI SDK, with chats and with responses: with_ai.mjs URL MODEL
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const at = { baseURL: `${url}/v1`, apiKey: "any" };
const compatible = createOpenAICompatible({ ...at, name: "kvroute", supportsStructuredOutputs: true });
const prompt = "What is the weather in Oslo?";

for (const model of [compatible(name), createOpenAI(at)(name)]) {
  const asked = [];
  const weather = tool({
    description: "The weather in a place.",
    inputSchema: z.object({ place: z.string() }),
    execute: async ({ place }) => asked.push(place) && "sunny",
  });
  const whole = await generateText({ model, prompt });
  assert.ok(whole.usage.outputTokens > 0);
  let text = "";
  for await (const piece of streamText({ model, prompt }).textStream) text += piece;
  assert.equal(text, whole.text);

  const done = await generateText({ model, prompt, tools: { weather }, stopWhen: isStepCount(3) });
  assert.equal(asked.length, 1);
  assert.ok(done.text);

  const place = Output.object({ schema: z.object({ place: z.string(), rainy: z.boolean() }) });
  const formed = await generateText({ model, prompt, output: place });
  assert.equal(typeof formed.output.rainy, "boolean");
}

const { embeddings } = await embedMany({
  model: compatible.textEmbeddingModel?.(name) ?? compatible.embeddingModel(name),
  values: ["a", "b"],
});
assert.notDeepEqual(embeddings[0], embeddings[1]);
