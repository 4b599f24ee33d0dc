// The AI SDK, unmodified, with its providers for OpenAI (responses and chat), for servers like it, and for Anthropic:
// texts whole and streamed, a tool, an object after a schema, and vectors. `node ask_ai_sdk.mjs URL` prints JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const anthropic = createAnthropic({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "cluster", baseURL, supportsStructuredOutputs: true });
const models = {
  responses: openai("tiny"),
  chat: openai.chat("tiny"),
  messages: anthropic("tiny"),
  compatible: compatible("tiny"),
};

const found = {};
for (const [name, model] of Object.entries(models)) {
  const asked = [];
  const tools = {
    get_sum: tool({
      description: "Adds two numbers.",
      inputSchema: z.object({ a: z.number(), b: z.number() }),
      execute: async ({ a, b }) => {
        asked.push([a, b]);
        return String(a + b);
      },
    }),
  };
  const ask = { model, prompt: "What is 3 + 4?", tools, stopWhen: stepCountIs(4), temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
  const whole = await generateText(ask);
  const stream = streamText(ask);
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  const { object } = await generateObject({
    model,
    prompt: "Any number.",
    schema: z.object({ answer: z.enum(["seven", "eight"]) }),
    maxOutputTokens: 300,
    maxRetries: 0,
  });
  found[name] = { whole: whole.text, steps: whole.steps.length, streamed, asked, object, usage: whole.totalUsage.outputTokens };
}
const completion = await generateText({ model: compatible.completionModel("tiny"), prompt: "one", maxOutputTokens: 5 });
const { embeddings } = await embedMany({ model: openai.embedding("tiny"), values: ["one", "two"], maxRetries: 0 });
console.log(JSON.stringify({ found, completion: completion.usage.outputTokens, vectors: embeddings.map((each) => each.length) }));
