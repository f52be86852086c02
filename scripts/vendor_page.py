"""Fetches the libraries of the page with npm, and keeps the files that it loads, unedited, with their licences:

    vendor_page.py

Each package is pinned by its version and the digest of its archive. ``vendor/sources.json`` says what came from where.
"""

import base64
import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "pyggml_spec" / "server" / "page" / "vendor"
LANGUAGES = (
    "bash", "c", "cpp", "csharp", "css", "diff", "go", "ini", "java", "javascript", "json", "kotlin", "lua", "makefile", "php", "python",
    "ruby", "rust", "sql", "swift", "typescript", "xml", "yaml",
)  # fmt: skip
PACKAGES = {  # licence, sha512 of the archive, files by the names that they get
    "marked@18.2.1": (
        "MIT", "ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        {"marked.js": "lib/marked.esm.js", "marked.LICENSE": "LICENSE"},
    ),
    "dompurify@3.4.18": (
        "Apache-2.0", "ofe3wI/uNm68HInABYFJYqQxRw1EaKAjNdrFVKqjUY+UZurvNd2L/HuQe097s/4RivWiZyP6tT7aoT8atjfhwg==",
        {"purify.js": "dist/purify.min.js", "purify.LICENSE": "LICENSE"},
    ),
    "@highlightjs/cdn-assets@11.12.0": (
        "BSD-3-Clause", "KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {"highlight.js": "es/core.min.js", "highlight.LICENSE": "LICENSE", **{f"languages/{n}.js": f"es/languages/{n}.min.js" for n in LANGUAGES}},
    ),
}  # fmt: skip


def main() -> None:
    listed = []
    with tempfile.TemporaryDirectory() as folder:
        for package, (licence, digest, files) in PACKAGES.items():
            packed = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True)
            data = (Path(folder) / packed.stdout.split()[-1]).read_bytes()
            if base64.b64encode(hashlib.sha512(data).digest()).decode() != digest:
                raise SystemExit(f"{package} is not the archive that was reviewed: its sha512 differs")
            hashes = {}
            with tarfile.open(Path(folder) / packed.stdout.split()[-1]) as archive:
                for name, member in files.items():
                    content = archive.extractfile(f"package/{member}").read()
                    (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
                    (FOLDER / name).write_bytes(content)
                    hashes[name] = hashlib.sha256(content).hexdigest()
            listed.append({"package": package, "licence": licence, "sha256": hashes})
    (FOLDER / "sources.json").write_text(json.dumps(listed, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
