// Vercel AI SDK: an agent with tools over six turns, by two providers; a streamed answer with usage.
// Run in the folder of its packages: node --input-type=module - URL < vercel_ai_agent.mjs
import { readFileSync } from 'node:fs';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, streamText, tool } from 'ai';

const url = process.argv[2];
const rules = Array.from({ length: 60 }, (_, n) => `Rule ${n} is kept by keeper ${(n * 7) % 31}.`);
const questions = Array.from({ length: 6 }, (_, n) => `Question ${n}: in which room is lantern ${n * 3}?`);
const inputSchema = jsonSchema({
  type: 'object',
  properties: { room: { type: 'string', enum: ['north', 'south', 'east', 'west'] } },
  required: ['room'],
  additionalProperties: false,
});
const tools = Object.fromEntries(
  ['find', 'count', 'move'].map((name) => [
    name,
    tool({ description: `To ${name} lanterns.`, inputSchema }),
  ]),
);
const settings = { system: rules.join(' '), tools, temperature: 0, maxOutputTokens: 64, maxRetries: 0 };

async function run() {
  const told = { answers: [], prompts: [], cached: [] };
  const count = (usage) => {
    told.prompts.push(usage.inputTokens);
    told.cached.push(usage.inputTokenDetails.cacheReadTokens ?? 0);
  };
  const models = [
    createOpenAICompatible({
      name: 'local', baseURL: `${url}/v1`, apiKey: 'none', includeUsage: true,
    })('default'),
    createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' })('default'),
  ];
  for (const model of models) {
    const messages = [];
    for (const content of questions) {
      messages.push({ role: 'user', content });
      const answer = await generateText({ ...settings, model, messages });
      told.answers.push(answer.text);
      messages.push(...answer.response.messages);
      count(answer.usage);
    }
    messages.push({ role: 'user', content: 'Which lantern is lit?' });
    const streamed = streamText({ ...settings, model, messages });
    told.answers.push(await streamed.text);
    count(await streamed.usage);
  }
  return told;
}

await fetch(`${url}/flush_cache?timeout=30`, { method: 'POST' });
const { version } = JSON.parse(readFileSync('node_modules/ai/package.json', 'utf8'));
console.log(JSON.stringify({ version, runs: [await run(), await run()] }));
