// An agent of the AI SDK (chat completions, Responses or Messages), or of the openai package for JavaScript.
import { execSync } from 'node:child_process';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import OpenAI from 'openai';
import { z } from 'zod';

const [mode, task] = process.argv.slice(2);
const bash = ({ command }) => execSync(command, { shell: '/bin/bash' }).toString();
const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = process.env.OPENAI_API_KEY;

async function runTools() {
  const parameters = { type: 'object', properties: { command: { type: 'string' }, timeout: { type: 'number' } } };
  const tools = [{ type: 'function', function: { name: 'bash', parse: JSON.parse, function: bash, parameters } }];
  const messages = [{ role: 'user', content: task }];
  return await new OpenAI().chat.completions.runTools({ model: 'policy', stream: true, messages, tools }).finalContent();
}

async function aiSdk() {
  const models = {
    chat: () => createOpenAICompatible({ name: 'door', baseURL, apiKey }).chatModel('policy'),
    'chat-stream': () => createOpenAICompatible({ name: 'door', baseURL, apiKey }).chatModel('policy'),
    responses: () => createOpenAI()('policy'),
    messages: () => createAnthropic({ baseURL: process.env.ANTHROPIC_BASE_URL + '/v1', apiKey })('policy'),
  };
  const inputSchema = z.object({ command: z.string(), timeout: z.number().optional() });
  const tools = { bash: tool({ description: 'Run a shell command.', inputSchema, execute: async (input) => bash(input) }) };
  const options = { model: models[mode](), system: 'Be brief.', prompt: task, stopWhen: stepCountIs(8), tools };
  return await (mode === 'chat-stream' ? streamText(options) : await generateText(options)).text;
}

console.log(await (mode === 'run-tools' ? runTools() : aiSdk()));
