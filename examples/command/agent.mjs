// An agent in JavaScript, without packages: it asks the model, answers calls of its one tool, and prints the last message.
// The variables OPENAI_BASE_URL and OPENAI_API_KEY name the model; the task is in task.json of the working directory.
import { readFileSync } from "node:fs";

const { question } = JSON.parse(readFileSync("task.json", "utf8"));
const number = { type: "number" };
const parameters = { type: "object", properties: { a: number, op: { enum: ["+", "-", "*", "/"] }, b: number } };
const tools = [{ type: "function", function: { name: "calc", description: "a op b", parameters } }];
const operators = { "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b, "/": (a, b) => a / b };
const messages = [{ role: "user", content: `${question} Use calc. End with the number.` }];

async function ask() {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: "policy", messages, tools }),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

function calc(text) {
  try {
    const { a, op, b } = JSON.parse(text);
    return String(operators[op](a, b));
  } catch {
    return 'Error: expected {"a": number, "op": "+", "b": number}';
  }
}

for (let turn = 0; turn < 6; turn++) {
  const message = await ask();
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log(message.content);
    break;
  }
  for (const call of message.tool_calls)
    messages.push({ role: "tool", tool_call_id: call.id, content: calc(call.function.arguments) });
}
