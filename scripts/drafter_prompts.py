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
friendship, teamwork, job interviews, travel in Japan, hiking, the ocean, elephants, computer networks, ancient Egypt, nutrition, stress, small businesses,
the telephone, the printing press, opera, football, basketball, the Great Wall of China, the moon landing, penicillin, the stock market, taxes, elections, the
constitution, human rights, philosophy, Stoicism, memory, language learning, poetry, fairy tales, cinema, television series, video games, cooking pasta, cheese,
wine, chocolate, olive oil, bees, cats, horses, wolves, sharks, whales, penguins, rainforests, glaciers, earthquakes, hurricanes, tides, the atmosphere, clouds,
magnetism, electricity, batteries, semiconductors, lasers, quantum mechanics, relativity, algebra, geometry, probability, statistics, prime numbers, cryptography,
operating systems, compilers, sorting algorithms, search engines, social media, mobile phones, satellites, trains, ships, bridges, architecture, cathedrals,
castles, the Renaissance, the Middle Ages, the Cold War, the Silk Road, the Vikings, ancient Greece, mythology, Buddhism, festivals, fashion, furniture, pottery"""
SUBJECTS = """Die Regierung, Der Präsident, Die Stadt Berlin, Ein junger Mann, Die Wissenschaftler, Der Verein, Das Unternehmen, Die Polizei, Viele Familien, Unser Lehrer,
Die Ministerin, Der Trainer, Eine Gruppe von Touristen, Das Krankenhaus, Die Europäische Union"""
PREDICATES = """hat am Montag einen neuen Plan vorgestellt, will im nächsten Jahr mehr Geld ausgeben, wartet seit Wochen auf eine Antwort, hat gestern das Spiel gewonnen,
sucht nach einer besseren Lösung für das Problem, musste wegen des Regens früher nach Hause gehen, warnt vor steigenden Preisen, freut sich über den großen Erfolg,
baut eine neue Schule in der Nähe des Flusses, kann die Kosten nicht mehr bezahlen, hat die Verhandlungen mit den Nachbarn beendet,
lehnt den Vorschlag der Opposition ab"""
TASKS = {
    "writing": ["Write a short story about {}.", "Write a blog post about {}.", "Draft an email to a colleague about {}.", "Write a poem about {}.",
                "Write an outline of an essay about {}."],
    "roleplay": ["Imagine you are a teacher who explains {} to a child. Begin your lesson.", "You are a guide who answers questions about {}. Introduce yourself.",
                 "Pretend to be a reporter and write about {}."],
    "humanities": ["What are the main ideas behind {}?", "Discuss how {} changed society.", "Describe the history of {}."],
    "stem": ["Explain {} step by step.", "What are the most important facts about {}?", "How does {} relate to everyday life?"],
    "qa": ["What is the best known fact about {}?", "Who should learn about {}, and why?", "Why is {} important?", "Who is famous for {}?", "When did {} begin?",
           "Where is {} most common?", "How many kinds of {} are there?"],
    "extraction": ["List five key terms about {} with a one-sentence definition of each.", "Make a JSON object with three facts about {}.",
                   "Make a table of advantages and disadvantages of {}."],
    "reasoning": ["Give three arguments for and three against {}.", "Compare {} with an alternative of your choice."],
    "coding": ["Write a Python class that models {}.", "Write a function in JavaScript that returns a random fact about {}.", "Write an HTML page about {}."],
}  # fmt: skip
QUESTIONS = (
    "What is this about?",
    "Why is this important?",
    "Who is mentioned here?",
    "What is the main point?",
    "When and where does this happen?",
)


def of_templates() -> list[dict]:
    topics = [topic.strip() for topic in TOPICS.replace("\n", " ").split(",")]
    german = product(*([part.strip() for part in parts.replace("\n", " ").split(",")] for parts in (SUBJECTS, PREDICATES)))
    translations = [_prompt("translation", f"Translate German to English: {subject} {predicate} .") for subject, predicate in german]
    return translations + [
        _prompt(category, task.format(topic)) for category, tasks in TASKS.items() for task, topic in product(tasks, topics)
    ]


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
    parser.add_argument("--math", type=int, default=4000, help="questions of GSM8K to take at most")
    parser.add_argument("--texts", type=Path, help="lines with a text, such as answers, to summarise and to ask about")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    found = of_templates() + of_documentation(rng)
    if args.gsm8k:
        questions = [json.loads(line)["question"] for line in args.gsm8k.read_text("utf-8").strip().split("\n")]
        found += [_prompt("math", question) for question in rng.sample(questions, min(args.math, len(questions)))]
    if args.texts:
        texts = [json.loads(line)["text"] for line in args.texts.read_text("utf-8").strip().split("\n")]
        found += [_prompt("summarization", f"Summarize: {text}") for text in texts[::2]]
        found += [_prompt("rag", f"{text}\n{rng.choice(QUESTIONS)}") for text in texts[1::2]]
    rng.shuffle(found)
    train, held = found[len(found) // 100 :], found[: len(found) // 100]
    if args.spec_bench:
        questions = [json.loads(line) for line in args.spec_bench.read_text("utf-8").strip().split("\n")]
        prompts = [_prompt(q["category"], q["turns"][0]) for q in questions]
        train, held = train + prompts[1::2], held + prompts[::2]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("train", train), ("heldout", held)):
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts), "utf-8")
        print(name, len(prompts))


if __name__ == "__main__":
    main()
