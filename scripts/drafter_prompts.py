#!/usr/bin/env python3
"""Prompts for training a drafter of a general chat model: questions of GSM8K and Spec-Bench, and prompts made from Python's documentation and of templates.

    python scripts/drafter_prompts.py --gsm8k questions.jsonl --spec-bench questions.jsonl --out build/prompts

Writes train.jsonl and heldout.jsonl: every second question of Spec-Bench and one of a hundred others are held out. Nothing of them is an answer.
"""

import argparse
import ast
import json
import random
import sysconfig
from itertools import product
from pathlib import Path

TOPICS = """solar energy, the French Revolution, machine learning, photosynthesis, healthy breakfasts, inflation, black holes, the Roman Empire, time management,
dogs, remote work, climate change, electric cars, the water cycle, public speaking, gardening, plate tectonics, vaccines, jazz music, chess openings, recycling,
the human heart, renewable energy, online privacy, coral reefs, volcanoes, the Silk Road, yoga, coffee, data structures, databases, the internet, antibiotics,
sleep, meditation, budgeting, the Industrial Revolution, democracy, supply and demand, evolution, DNA, gravity, the solar system, Shakespeare, impressionism,
bicycles, space travel, artificial intelligence, bread baking, the Olympics, honey bees, tea, deserts, rivers, libraries, robots, photography, wind turbines,
friendship, teamwork, job interviews, travel in Japan, hiking, the ocean, elephants, computer networks, ancient Egypt, nutrition, stress, small businesses"""
TASKS = {
    "writing": ["Write a short story about {}.", "Write a blog post about {}.", "Draft an email to a colleague about {}.", "Write a poem about {}.",
                "Write an outline of an essay about {}."],
    "roleplay": ["Imagine you are a teacher who explains {} to a child. Begin your lesson.", "You are a guide who answers questions about {}. Introduce yourself.",
                 "Pretend to be a reporter and write about {}."],
    "humanities": ["What are the main ideas behind {}?", "Discuss how {} changed society.", "Describe the history of {}."],
    "stem": ["Explain {} step by step.", "What are the most important facts about {}?", "How does {} relate to everyday life?"],
    "qa": ["What is the best known fact about {}?", "Who should learn about {}, and why?", "Why is {} important?"],
    "extraction": ["List five key terms about {} with a one-sentence definition of each.", "Make a JSON object with three facts about {}.",
                   "Make a table of advantages and disadvantages of {}."],
    "reasoning": ["Give three arguments for and three against {}.", "Compare {} with an alternative of your choice."],
    "coding": ["Write a Python class that models {}.", "Write a function in JavaScript that returns a random fact about {}.", "Write an HTML page about {}."],
}  # fmt: skip
SENTENCES = 12  # of a passage to summarise


def of_templates() -> list[dict]:
    topics = [topic.strip() for topic in TOPICS.replace("\n", " ").split(",")]
    return [_prompt(category, task.format(topic)) for category, tasks in TASKS.items() for task, topic in product(tasks, topics)]


def of_documentation(rng: random.Random) -> list[dict]:
    """Functions to write, and passages to summarise or ask about, from the docstrings of Python's standard library."""
    out = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) or not (text := ast.get_docstring(node)):
                continue
            if (
                isinstance(node, ast.FunctionDef)
                and not node.name.startswith("_")
                and 20 < len(line := text.split("\n\n")[0].replace("\n", " ")) < 200
            ):
                names = ", ".join(arg.arg for arg in node.args.args if arg.arg != "self")
                out.append(_prompt("coding", f"Write a Python function `{node.name}({names})`. {line}"))
            elif 600 < len(text) < 3000:
                ask = rng.choice(["Summarize the following text:", "Explain this documentation in simple words:"])
                out.append(_prompt("summarization", f"{ask}\n\n{text}"))
                out.append(
                    _prompt("rag", f"Use the text to answer the question.\n\nText: {text}\n\nQuestion: What does {path.stem} offer here?")
                )
    return out


def _prompt(category: str, text: str) -> dict:
    return {"category": category, "messages": [{"role": "user", "content": text}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, help="lines with a question")
    parser.add_argument("--spec-bench", type=Path, help="lines with a category and turns")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    found = of_templates() + of_documentation(rng)
    if args.gsm8k:
        found += [_prompt("math", json.loads(line)["question"]) for line in args.gsm8k.read_text("utf-8").strip().split("\n")]
    rng.shuffle(found)
    train, held = found[len(found) // 100 :], found[: len(found) // 100]
    if args.spec_bench:
        questions = [json.loads(line) for line in args.spec_bench.read_text("utf-8").strip().split("\n")]
        prompts = [_prompt(q["category"], q["turns"][0]) for q in questions]
        train, held = train + prompts[1::2], prompts[::2]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("train", train), ("heldout", held)):
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts), "utf-8")
        print(name, len(prompts))


if __name__ == "__main__":
    main()
