// npm: ollama
// Ollama's JavaScript client.
import { Ollama } from "ollama";
import assert from "node:assert";

const { PYSPEC_URL: host, PYSPEC_MODEL: model } = process.env;
const client = new Ollama({ host });
const messages = [{ role: "user", content: "Name a colour." }];
assert((await client.list()).models.some((one) => one.name === model));
assert((await client.chat({ model, messages, options: { num_predict: 12 } })).message.content);
let text = "";
for await (const part of await client.generate({ model, prompt: "Name a colour.", stream: true, options: { num_predict: 12 } })) text += part.response;
assert(text);
