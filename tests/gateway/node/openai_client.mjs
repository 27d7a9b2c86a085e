// Talks to the gateway as a user of the official SDK would; prints what came as JSON.
// Run in the folder that has node_modules: node openai_client.mjs BASE_URL KEY MAX_TOKENS
import OpenAI from "openai";

const [baseURL, apiKey, maxTokens] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const model = (await client.models.list()).data[0].id;
const ask = { model, messages: [{ role: "user", content: "Hello!" }], max_tokens: Number(maxTokens) };

const whole = await client.chat.completions.create(ask);

const streamed = { text: "", finish: null, usage: null };
const stream = await client.chat.completions.create({
  ...ask,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed.text += chunk.choices[0]?.delta?.content ?? "";
  streamed.finish = chunk.choices[0]?.finish_reason ?? streamed.finish;
  streamed.usage = chunk.usage ?? streamed.usage;
}

const events = [];
const responses = await client.responses.create({
  model,
  input: "Hello!",
  max_output_tokens: Number(maxTokens),
  stream: true,
});
for await (const event of responses) events.push(event.type);

let refused = null;
try {
  await client.chat.completions.create({ ...ask, model: "nope" });
} catch (error) {
  refused = { name: error.constructor.name, status: error.status, code: error.code };
}

console.log(
  JSON.stringify({
    whole: { text: whole.choices[0].message.content, usage: whole.usage },
    streamed,
    events,
    refused,
  }),
);
