// The AI SDK: text, streams, tools and objects, by its provider for servers that are compatible with OpenAI's.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "headrace", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true });
const model = provider(name);

const whole = await generateText({ model, prompt: "hello", maxRetries: 0 });
assert.equal(whole.text, "Hi there.");
assert.ok(whole.usage.outputTokens > 0);

let text = "";
for await (const piece of streamText({ model, prompt: "hello", maxRetries: 0 }).textStream) text += piece;
assert.equal(text, "Hi there.");

const cities = [];
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return "5 degrees";
    },
  }),
};
const prompt = "What is the weather in Oslo?";
const answered = await generateText({ model, tools, prompt, stopWhen: stepCountIs(3), maxRetries: 0 });
assert.equal(answered.text, "It is cold.");
const streamed = streamText({ model, tools, prompt, stopWhen: stepCountIs(3), maxRetries: 0 });
text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, "It is cold.");
assert.deepEqual(cities, ["Oslo", "Oslo"]);

const schema = z.object({ name: z.string(), age: z.number() });
const { object } = await generateObject({ model, schema, prompt: "A person as JSON, please", maxRetries: 0 });
assert.deepEqual(object, { name: "Ada", age: 36 });
