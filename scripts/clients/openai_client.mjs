// npm: openai
// Chats, streams, calls and responses.
import OpenAI from "openai";
import assert from "node:assert";

const { PYSPEC_URL: url, PYSPEC_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "Name a colour." }];
const whole = await client.chat.completions.create({ model, messages, max_tokens: 12 });
assert(whole.choices[0].message.content);
let text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 12, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
assert(text);
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 80 });
assert.equal(called.choices[0].message.tool_calls[0].function.name, "weather");
const response = await client.responses.create({ model, input: "Name a colour.", max_output_tokens: 12 });
assert(response.output_text);
