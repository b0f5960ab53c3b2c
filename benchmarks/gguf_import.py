"""The proof that an imported GGUF file is the same model: weights, log-probs, and the ids of a corpus of 90,000 lines.

Run: .venv/bin/python -m benchmarks.gguf_import FILE.gguf [--llama-cpp FOLDER] [--vocabularies FOLDER] [--originals FOLDER]
(about five minutes for SmolLM2-135M)

Weights and logits are compared with those of transformers' own loader of the same file. Ids are compared with those of
llama.cpp, which reads the same file (`npm install --prefix FOLDER node-llama-cpp@3`), and its log-probs with ours, which
differ by its own rounding of activations to 8 bits. `--vocabularies` holds llama.cpp's files of vocabularies (its folder
`models`), one for each pre-tokenizer; `--originals` holds tokenizer.json files as their makers published them, NAME.json
for ggml-vocab-NAME.gguf.

The corpus: distinct lines of the text and source files of the installed packages and of this repository, those with
letters beyond ASCII first, and 10,000 lines of characters drawn at random from all classes of Unicode.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_gguf.header import read_header
from agentrl_gguf.importing import check_file, record_of, write_model_directory
from agentrl_gguf.tokenizer import read_tokenizer
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "gguf_import.json"
LINES: Final = 90_000
RANDOM_LINES: Final = 10_000
MAX_CHARACTERS: Final = 2_000
SUFFIXES: Final = re.compile(r"\.(c|cfg|css|h|html|ini|js|jsonl?|md|pot?|pyi?|rst|sh|sql|tex|toml|tsx?|txt|xml|ya?ml)")
LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789  ''..,,\t\n\r_-"
SNIPPETS: Final = 16
"""Texts of which log-probs are compared."""
SNIPPET_TOKENS: Final = 32
PROGRAM: Final = r"""
import fs from "fs";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";
const [path, input, output] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const {texts, contexts} = JSON.parse(fs.readFileSync(input, "utf8"));
const model = await llama.loadModel({modelPath: path, vocabOnly: contexts.length === 0});
const ids = texts.map((text) => Array.from(model.tokenize(text, false)));
console.error(path, texts.length, "lines");
const chances = [];
if (contexts.length > 0) {
  const context = await model.createContext({contextSize: 256, sequences: 1});
  const sequence = context.getSequence();
  for (const each of contexts) {
    await sequence.clearHistory();
    const steps = await sequence.controlledEvaluate(
      each.map((token, at) => [token, {generateNext: {probabilities: at + 1 < each.length}}]));
    chances.push(each.slice(1).map((token, at) => steps[at].next.probabilities.get(token) ?? 0));
  }
}
fs.writeFileSync(output, JSON.stringify({ids, chances}));
process.exit(0);
"""


def corpus() -> list[str]:
    """Return `LINES` distinct lines, the same on every call for the same installed packages."""
    found: dict[str, None] = dict.fromkeys(_random_lines())
    plain: dict[str, None] = {}
    for folder in (Path(sysconfig.get_paths()["purelib"]), Path(torch.__file__).parents[1], Path(__file__).parents[1]):
        for path in sorted(folder.rglob("*")):
            if SUFFIXES.fullmatch(path.suffix) and path.is_file() and ".venv" not in path.relative_to(folder).parts:
                for line in path.read_bytes().decode(errors="ignore").split("\n")[:2000]:
                    if line.strip() and len(line) <= MAX_CHARACTERS:
                        (plain if line.isascii() else found)[line] = None
        if len(found) >= LINES:
            break
    drawn = random.Random(0)
    others, lines = [*plain], [*found]
    beyond = lines[RANDOM_LINES:]
    drawn.shuffle(beyond)
    half = (LINES - RANDOM_LINES) // 2
    kept = lines[:RANDOM_LINES] + beyond[:half]
    return kept + drawn.sample(others, LINES - len(kept))


def _random_lines() -> Iterator[str]:
    """Yield lines of characters of all classes of Unicode, with ASCII between them."""
    classes: dict[str, list[str]] = {}
    for number in range(0x20000):
        kind = unicodedata.category(chr(number))
        if kind not in ("Cs", "Cn", "Co"):
            classes.setdefault(kind, []).append(chr(number))
    drawn, kinds = random.Random(1), sorted(classes)
    for _ in range(RANDOM_LINES):
        parts = [
            drawn.choice(LETTERS) if drawn.random() < 0.6 else drawn.choice(classes[drawn.choice(kinds)])
            for _ in range(drawn.randint(4, 60))
        ]
        yield "".join(parts)


def by_llama_cpp(
    folder: Path, file: Path, texts: Sequence[str], contexts: Sequence[Sequence[int]] = ()
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the ids that llama.cpp gives texts, and the probability that it gives each token of contexts but the first."""
    program = folder / "agentrl_gguf_import.mjs"
    program.write_text(PROGRAM)
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "in.json"), Path(place, "out.json")
        source.write_text(json.dumps({"texts": list(texts), "contexts": [list(each) for each in contexts]}))
        subprocess.run(["node", program, file.absolute(), source, target], check=True)
        out = json.loads(target.read_text())
    return out["ids"], out["chances"]


def differences(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], lines: Sequence[str]) -> dict[str, Any]:
    """Return how many lines have other ids, and the first of them."""
    wrong = [line for line, first, second in zip(lines, ours, theirs, strict=True) if list(first) != list(second)]
    return {"lines": len(lines), "tokens": sum(map(len, ours)), "different": len(wrong), "first": wrong[:5]}


def encode(tokenizer: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    """Return the ids of lines, without what a post-processor adds."""
    return [each.ids for each in tokenizer.encode_batch(list(lines), add_special_tokens=False)]


def compare_vocabularies(folder: Path, llama_cpp: Path, originals: Path | None, lines: Sequence[str]) -> dict[str, Any]:
    """Return the differences for each file of a vocabulary whose tokenizer can be imported."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        header = read_header(path)
        tokens = header.strings("tokenizer.ggml.tokens") or []
        try:
            data = read_tokenizer(header, len(tokens)).tokenizer
        except ValueError as error:
            found[path.stem] = str(error).removeprefix(f"{path}: ")
            continue
        ours = encode(Tokenizer.from_str(json.dumps(data)), lines)
        found[path.stem] = {"llama.cpp": differences(ours, by_llama_cpp(llama_cpp, path, lines)[0], lines)}
        published = None if originals is None else originals / f"{path.stem.removeprefix('ggml-vocab-')}.json"
        if published is not None and published.is_file():
            found[path.stem]["original"] = differences(ours, encode(Tokenizer.from_file(str(published)), lines), lines)
    return found


def compare_weights(file: Path, imported: Path) -> tuple[dict[str, Any], Any]:
    """Return how the weights and logits differ from those of transformers' loader, and the imported model."""
    ours: Any = AutoModelForCausalLM.from_pretrained(imported, dtype=torch.float32)
    theirs: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    first, second = ours.state_dict(), theirs.state_dict()
    ids = torch.randint(0, ours.config.vocab_size, (4, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gap = (ours(ids).logits - theirs(ids).logits).abs().max().item()
    return {
        "tensors": len(first),
        "same names": first.keys() == second.keys(),
        "different tensors": sum(not torch.equal(first[name], second[name]) for name in first),
        "largest difference of a logit": gap,
    }, ours


def compare_logprobs(model: Any, chances: Sequence[Sequence[float]], contexts: Sequence[Sequence[int]]) -> dict[str, float]:  # noqa: ANN401 - of transformers
    """Return how log-probs of tokens differ from those of llama.cpp, in nats."""
    gaps: list[float] = []
    for ids, row in zip(contexts, chances, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        ours = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        gaps += [abs(mine.item() - torch.tensor(p).log().item()) for mine, p in zip(ours, row, strict=True) if p > 1e-6]
    ordered = sorted(gaps)
    return {
        "tokens": len(gaps),
        "mean": sum(gaps) / len(gaps),
        "p99": ordered[len(gaps) * 99 // 100],
        "largest": ordered[-1],
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    for name in ("--llama-cpp", "--vocabularies", "--originals"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    lines, result = corpus(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as place:
        imported, checked = Path(place, "model"), check_file(options.file, dtype="float32")
        write_model_directory(checked, record_of(checked), imported)
        result["weights"], model = compare_weights(options.file, imported)
        tokenizer = Tokenizer.from_file(str(imported / "tokenizer.json"))
        ours = encode(tokenizer, lines)
        loaded: Any = AutoTokenizer.from_pretrained(imported)
        result["ids, AutoTokenizer"] = differences(ours, loaded(lines, add_special_tokens=False).input_ids, lines)
        transformers: Any = AutoTokenizer.from_pretrained(options.file.parent, gguf_file=options.file.name)
        theirs = transformers(lines, add_special_tokens=False).input_ids
        result["ids, transformers' loader of the file"] = differences(ours, theirs, lines)
    print(json.dumps(result, indent=1, ensure_ascii=False), file=sys.stderr)
    if options.llama_cpp is not None:
        contexts = [ids[:SNIPPET_TOKENS] for ids in ours[RANDOM_LINES:] if len(ids) >= SNIPPET_TOKENS][:SNIPPETS]
        theirs, chances = by_llama_cpp(options.llama_cpp, options.file, lines, contexts)
        result["ids, llama.cpp"] = differences(ours, theirs, lines)
        result["log-probs, llama.cpp"] = compare_logprobs(model, chances, contexts)
        if options.vocabularies is not None:
            result["vocabularies"] = compare_vocabularies(options.vocabularies, options.llama_cpp, options.originals, lines)
    result["machine"] = describe_machine("gguf", "tokenizers", "torch", "transformers")
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    RESULTS.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
