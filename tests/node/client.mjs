// Calls a gateway as people do with the official package, and prints what it saw as one JSON object:
// node client.mjs BASE_URL API_KEY SCRIPT, where SCRIPT is the message that the reply is scripted by.
import OpenAI from "openai";

const [baseURL, apiKey, script] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 20_000 });
const model = "default";
const messages = [{ role: "user", content: script }];
const seen = {};

const completion = await client.chat.completions.create({ model, messages, store: true });
seen.completion = completion.choices[0].message.content;
seen.usage = completion.usage.total_tokens;
seen.stored = (await client.chat.completions.retrieve(completion.id)).choices[0].message.content;

seen.chunks = [];
const stream = await client.chat.completions.create({
  model,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  const text = chunk.choices[0]?.delta?.content;
  if (text) seen.chunks.push(text);
  if (chunk.usage) seen.streamUsage = chunk.usage.total_tokens;
}

const response = await client.responses.create({ model, input: script });
seen.response = response.output_text;
seen.events = [];
seen.deltas = [];
for await (const event of await client.responses.create({ model, input: script, stream: true })) {
  seen.events.push(event.type);
  if (event.type === "response.output_text.delta") seen.deltas.push(event.delta);
}
seen.resumed = [];
for await (const event of await client.responses.retrieve(response.id, { stream: true, starting_after: 4 })) {
  seen.resumed.push(event.sequence_number);
}

const file = await client.files.create({
  file: await OpenAI.toFile(Buffer.from('{"custom_id": "a"}\n'), "in.jsonl"),
  purpose: "batch",
});
seen.file = (await client.files.retrieve(file.id)).bytes;
seen.models = [];
for await (const one of await client.models.list()) seen.models.push(one.id);
seen.flagged = (await client.moderations.create({ input: "hello" })).results[0].flagged;

seen.errors = [];
for (const call of [
  () => client.chat.completions.create({ model, messages, temperature: 9 }),
  () => client.responses.retrieve(`resp_${"0".repeat(32)}`),
  () => new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 }).models.list(),
]) {
  try {
    await call();
  } catch (error) {
    seen.errors.push([error.status, error.code, error.constructor.name]);
  }
}
console.log(JSON.stringify(seen));
