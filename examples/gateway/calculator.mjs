// The agent of the calculator demo and its environment as one program, in JavaScript without packages. It finds the policy
// by OPENAI_BASE_URL and OPENAI_API_KEY, reads task.json, and leaves its reward in reward.json.
import { readFileSync, writeFileSync } from "node:fs";
import { request } from "node:http"; // it loads in a third of the time of fetch, and a program starts in every episode

const MAX_TURNS = 6;
const BUSY_SHARE = 0.15;
const { question, answer, seed } = JSON.parse(readFileSync("task.json", "utf8"));
const integer = { type: "integer" };
const properties = { a: integer, op: { type: "string", enum: ["+", "-", "*"] }, b: integer };
const parameters = { type: "object", properties, required: ["a", "op", "b"] };
const description = "Do one arithmetic operation on two integers.";
const tools = [{ type: "function", function: { name: "calc", description, parameters } }];
const operators = { "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b };

function ask(messages) {
  const url = `${process.env.OPENAI_BASE_URL}/chat/completions`;
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` };
  return new Promise((resolve, reject) => {
    const call = request(url, { method: "POST", headers }, (response) => {
      const parts = [];
      response.on("data", (part) => parts.push(part));
      response.on("error", reject);
      response.on("end", () => {
        const text = Buffer.concat(parts).toString();
        if (response.statusCode !== 200) reject(new Error(`${response.statusCode}: ${text}`));
        else resolve(JSON.parse(text).choices[0].message);
      });
    });
    call.on("error", reject);
    call.end(JSON.stringify({ model: "policy", messages, tools }));
  });
}

let state = seed;
function isBusy() { // the same calls of a task are busy in each of its episodes
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  return state / 2 ** 32 < BUSY_SHARE;
}

function calc({ name, arguments: text }) {
  let given = null;
  try {
    given = JSON.parse(text);
  } catch {}
  const isCall =
    name === "calc" &&
    given !== null &&
    typeof given === "object" &&
    Object.keys(given).sort().join() === "a,b,op" &&
    Object.hasOwn(operators, given.op) &&
    Number.isInteger(given.a) &&
    Number.isInteger(given.b);
  if (!isCall) return "error: bad call";
  return isBusy() ? "error: busy" : String(operators[given.op](given.a, given.b));
}

const messages = [{ role: "user", content: question }];
let reward = 0;
let wrongAnswers = 0;
for (let turn = 0; turn < MAX_TURNS; turn++) {
  const message = await ask(messages);
  messages.push(message);
  if (message.tool_calls?.length) {
    for (const call of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: calc(call.function) });
    continue;
  }
  const text = message.content ?? "";
  if (text.includes("<tool_call>")) {
    messages.push({ role: "user", content: "error: bad call" });
  } else if (text.match(/-?\d+/g)?.at(-1) === answer) {
    reward = wrongAnswers ? 0.7 : 1;
    break;
  } else if (++wrongAnswers > 1) {
    break;
  } else {
    messages.push({ role: "user", content: "Wrong, try again." });
  }
}
writeFileSync("reward.json", JSON.stringify({ reward }));
process.exit(0); // rather than wait for the connection to go idle
