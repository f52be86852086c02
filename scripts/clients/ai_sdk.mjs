// npm: ai @ai-sdk/openai-compatible
// Vercel's AI SDK, which opencode and others use.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import assert from "node:assert";

const { PYSPEC_URL: url, PYSPEC_MODEL: name } = process.env;
const model = createOpenAICompatible({ name: "pyspec", baseURL: `${url}/v1`, apiKey: "none" })(name);
assert((await generateText({ model, prompt: "Name a colour.", maxOutputTokens: 12 })).text);
let text = "";
for await (const part of streamText({ model, prompt: "Name a colour.", maxOutputTokens: 12 }).textStream) text += part;
assert(text);
