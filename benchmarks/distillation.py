"""How much accuracy it costs that distilled images look like their class.

Each setting is a run of `bestresponse reproduce distill` on MNIST. The first one leaves the pixels free. The others
keep them within the range of the data. Some start at the class means and pull the images back there, with a growing
weight; some pull them to means of the original images whose weights are tuned as well, and add the loss of four
networks that read them. Two further networks that were trained on the original images read the distilled ones.

    python benchmarks/distillation.py --threads 1        # half an hour of a core

It prints a table, and writes distillation.json and distillation.png into --out. The folder of the data is named by
--data-dir or BESTRESPONSE_DATA.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file

from bestresponse import cli
from bestresponse._layout import table
from bestresponse.experiments.runs import versions, write_whole

FREE = "--steps 450 --pixel-rate 0.03 --start noise --closeness 0 --smoothness 2"
MEANS = "--steps 450 --pixel-rate 0.03 --start means --within-range --closeness"
MIXTURES = "--steps 800 --pixel-rate 0.3 --start mixtures --within-range --penalty 1e-3 --closeness 0.5 --readability"
SETTINGS = {
    "free": FREE,
    **{f"class means, closeness {c}": f"{MEANS} {c}" for c in ("0.25", "1", "4")},
    **{f"mixtures, readability {r}": f"{MIXTURES} {r}" for r in ("0.1", "0.5")},
}


def measured(name: str, folder: Path) -> dict[str, Any]:
    """The row of a finished run."""
    rows = {row["training set"]: row for row in json.loads((folder / "result.json").read_text())["rows"]}
    readers = [row for key, row in rows.items() if key.startswith("all, for the reader")]
    found: dict[str, Any] = {
        "setting": name,
        "test accuracy": rows["distilled, trained anew"]["test accuracy"],
    }
    return found | {f"read by {row['training set'].split()[-1]}": int(row["read"]) for row in readers}


def draw(rows: list[dict[str, Any]], folders: dict[str, Path], path: Path) -> None:
    """A line of images for each setting, with its accuracy and the number of images read."""
    figure, axes = plt.subplots(len(rows), 10, figsize=(10.5, 0.98 * len(rows)), layout="constrained")
    for line, row in zip(axes, rows, strict=True):
        images = load_file(folders[row["setting"]] / "distilled.safetensors")["images"]
        for panel, image in zip(line, images, strict=True):
            panel.imshow(image[0].numpy(), cmap="gray")
            panel.set(xticks=[], yticks=[])
        read = " and ".join(str(value) for key, value in row.items() if key.startswith("read by"))
        setting = row["setting"].replace(", ", ",\n")
        words = f"{setting}\n{100 * row['test accuracy']:.1f} %\nread: {read}"
        line[0].set_ylabel(words, rotation=0, ha="right", va="center", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folders = {name: options.out / name.replace(", ", "-").replace(" ", "-") for name in SETTINGS}
    for name, words in SETTINGS.items():
        if (folders[name] / "result.json").is_file():
            continue
        more = ["--data-dir", str(options.data_dir)] if options.data_dir else []
        more += ["--threads", str(options.threads)]
        cli.main(
            [
                "reproduce",
                "distill",
                "--data",
                "mnist",
                "--readers",
                *words.split(),
                *more,
                "--out",
                str(folders[name]),
            ]
        )
    rows = [measured(name, folders[name]) for name in SETTINGS]
    draw(rows, folders, options.out / "distillation.png")
    write_whole(options.out / "distillation.json", {"rows": rows, "versions": versions()})
    print(table(rows))


if __name__ == "__main__":
    main()
