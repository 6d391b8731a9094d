import gzip
import json
import signal
import struct
import subprocess
import sys
import threading

import pytest
import torch

import bestresponse as br

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tyro")

from bestresponse import cli  # noqa: E402
from bestresponse.experiments import catalogue, data, models, overfit, runs  # noqa: E402


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def run(*arguments):
    return cli.main(["reproduce", "overfit", *(str(a) for a in arguments)])


# --- the command line -----------------------------------------------------------------------------


def test_overfit_on_digits_writes_its_files(tmp_path, capsys):
    out = tmp_path / "run"
    assert run("--steps", 60, "--weight-rate", 1e-3, "--out", out) == 0
    shown = capsys.readouterr().out
    assert "validation error" in shown
    assert str(out) in shown
    assert {p.name for p in out.iterdir()} == {"config.json", "metrics.jsonl", "result.json", "errors.png"}
    config = json.loads((out / "config.json").read_text())
    assert (config["experiment"], config["steps"], config["data"]) == ("overfit", 60, "digits")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    assert {"train_error", "val_error", "test_error", "val_loss", "products"} <= rows[-1].keys()
    result = json.loads((out / "result.json").read_text())
    assert result["headline"].keys() == {"validation error", "test error"}
    assert result["rows"][0]["hyperparameters"] == result["rows"][0]["weights"] == 64 * 64 + 64 + 640 + 10
    assert result["seed"] == 0
    assert not result["interrupted"]
    assert result["rows"][0]["validation error"] < 0.6
    assert rows[-1]["test_error"] == result["rows"][0]["test error"]  # of the same images


def test_a_saved_run_is_resumed(tmp_path, capsys):
    def losses(folder):
        rows = [json.loads(row) for row in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        return [(row["hyper_step"], row["val_loss"], row.get("test_error")) for row in rows]

    options = ("--model", "linear", "--method", "neumann-auto")
    run("--steps", 8, *options, "--out", tmp_path / "whole")
    run("--steps", 5, *options, "--out", tmp_path / "pieces", "--save-every", 3)
    assert run("--steps", 8, *options, "--out", tmp_path / "pieces", "--resume") == 0
    assert losses("pieces") == losses("whole")
    assert run("--steps", 9, *options, "--seed", 1, "--out", tmp_path / "pieces", "--resume") == 1
    assert "it had seed=0" in capsys.readouterr().err
    assert run("--steps", 9, *options, "--out", tmp_path / "whole", "--resume") == 1
    assert "has no run.pt. Start with --save-every" in capsys.readouterr().err
    run("--steps", 1, *options, "--out", tmp_path / "pieces")
    assert not (tmp_path / "pieces" / "run.pt").exists()


def test_a_run_is_reproducible(tmp_path):
    headlines = []
    for name in ("a", "b"):
        run("--steps", 5, "--model", "linear", "--method", "neumann", "--terms", 2, "--out", tmp_path / name)
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        headlines.append([json.loads(row)["val_loss"] for row in rows])
    assert headlines[0] == headlines[1]


@pytest.mark.parametrize("method", overfit.METHODS)
def test_every_method_of_the_command_line(tmp_path, method):
    assert (
        run("--steps", 2, "--model", "linear", "--method", method, "--terms", 2, "--out", tmp_path / "x") == 0
    )


def test_figures_are_drawn_again_from_the_files(tmp_path, capsys):
    out = tmp_path / "run"
    run("--steps", 4, "--model", "linear", "--out", out)
    (out / "errors.png").unlink()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"hyper_step": 5, "train_er')  # a kill in the middle of a row
    assert cli.main(["plot", str(out)]) == 0
    assert (out / "errors.png").stat().st_size > 5_000
    assert len(runs.read_rows(out)) == 4
    assert cli.main(["plot", str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err


def test_help_and_unknown_commands(capsys):
    assert cli.main([]) == 0
    assert "reproduce NAME" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == br.__version__
    assert cli.main(["reproduce", "nothing"]) == 2
    assert "no experiment 'nothing'; the experiments are " in capsys.readouterr().err
    assert cli.main(["reproduce"]) == 0
    assert cli.main(["draw"]) == 2
    assert "no such command: draw" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        run("--help")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--initial-log-decay" in shown
    assert "default: -8.0" in shown


def test_errors_are_one_sentence_without_a_traceback(tmp_path, capsys):
    assert run("--model", "lenet", "--out", tmp_path / "x") == 1
    assert "lenet needs images of at least 28×28" in capsys.readouterr().err
    assert run("--data", "mnist", "--data-dir", tmp_path, "--out", tmp_path / "x") == 1
    message = capsys.readouterr().err
    assert "MNIST needs the file train-images-idx3-ubyte.gz" in message
    assert "https://" in message
    out = tmp_path / "kept"
    run("--steps", 2, "--model", "linear", "--out", out)
    kept = (out / "result.json").read_text()
    for option, value in (
        ("--steps", 0),
        ("--weight-steps", 0),
        ("--train-size", -5),
        ("--weight-rate", -1.0),
        ("--threads", -1),
        ("--device", "foo"),
        ("--terms", -1),
    ):
        assert run("--out", out, "--method", "neumann", option, value) == 1
        assert "must" in capsys.readouterr().err
        assert (out / "result.json").read_text() == kept
    (tmp_path / "file").write_text("")
    assert run("--steps", 1, "--out", tmp_path / "file") == 1
    assert "--out must name a folder" in capsys.readouterr().err
    assert run("--steps", 1, "--train-size", 1_190, "--out", tmp_path / "x") == 1
    assert "1198 examples; got a request for 1240" in capsys.readouterr().err


@pytest.fixture
def interrupts():
    """Python's own answer to SIGINT; a job in the background inherits that the signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_ends_with_its_files_whole(tmp_path, capsys, interrupts):
    out, ended = tmp_path / "run", threading.Event()
    metrics = out / "metrics.jsonl"

    def interrupt():
        while not ended.wait(0.02):
            if metrics.exists() and metrics.stat().st_size:
                signal.raise_signal(signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert run("--steps", 100_000, "--model", "linear", "--out", out) == 130
    finally:
        ended.set()
        thread.join()
    shown = capsys.readouterr()
    assert shown.err.endswith("\nbestresponse: interrupted\n")
    assert "Traceback" not in shown.err
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["hyper_step"] for row in rows] == list(range(1, len(rows) + 1))
    result = json.loads((out / "result.json").read_text())
    assert result["interrupted"]
    assert result["hyper_steps"] == len(rows)
    assert f"interrupted after {len(rows)} of 100000 hyper-steps" in shown.out


def test_the_core_needs_no_extra():
    code = (
        "import sys\n"
        "for name in ('numpy', 'sklearn', 'matplotlib', 'tyro'): sys.modules[name] = None\n"
        "import bestresponse.testing\n"
        "from bestresponse.cli import main\n"
        "raise SystemExit(main(['reproduce', 'overfit']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'bestresponse[experiments]'" in done.stderr
    assert "Traceback" not in done.stderr


# --- the paper's result ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the linear solve ended")
def test_the_default_run_learns_the_validation_set_by_heart(tmp_path):
    assert run("--out", tmp_path / "run") == 0
    row = json.loads((tmp_path / "run" / "result.json").read_text())["rows"][0]
    assert row["train error"] == 0.0
    assert row["validation error"] == 0.0
    assert row["test error"] > 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the linear solve ended")
@pytest.mark.parametrize(("name", "test_error"), [("mnist", 0.15), ("cifar10", 0.6)])
def test_linear_models_overfit_real_data(tmp_path, data_folder, name, test_error):
    rate = 1e-3 if name == "mnist" else 1e-4
    out = tmp_path / "run"
    options = ("--model", "linear", "--data-dir", data_folder, "--weight-rate", rate, "--out", out)
    assert run("--data", name, *options) == 0
    row = json.loads((out / "result.json").read_text())["rows"][0]
    assert row["train error"] == 0.0
    assert row["validation error"] == 0.0
    assert row["test error"] > test_error


# --- data and models --------------------------------------------------------------------------------------


def test_digits():
    images = data.load("digits")
    assert images.shape == (1, 8, 8)
    assert len(images.x_train) + len(images.x_test) == 1797
    assert float(images.x_train.mean()) == pytest.approx(0, abs=1e-5)
    assert float(images.x_train.std()) == pytest.approx(1, abs=1e-3)
    (x, y), (x_val, _) = images.draw(50, 30, seed=3)
    assert x.shape == (50, 1, 8, 8)
    assert y.dtype == torch.int64
    assert len(x_val) == 30
    again = images.draw(50, 30, seed=3)
    assert torch.equal(x, again[0][0])
    assert not torch.equal(x, images.draw(50, 30, seed=4)[0][0])
    with pytest.raises(br.Error, match="Ask for fewer"):
        images.draw(1000, 1000, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "train"),
    [("mnist", (1, 28, 28), 60_000), ("cifar10", (3, 32, 32), 10_000), ("cifar100", (3, 32, 32), 6_000)],
)
def test_real_archives(data_folder, name, shape, train):
    images = data.load(name, data_folder)
    assert images.shape == shape
    assert len(images.x_train) == len(images.y_train) == train
    assert set(images.y_test.tolist()) == set(range(images.classes))
    assert float(images.x_train.mean()) == pytest.approx(0, abs=1e-3)


def write_idx(path, array, compressed):
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if compressed else content)


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files(tmp_path, compressed):
    generator = np.random.default_rng(0)
    end = ".gz" if compressed else ""
    pixels, labels = {}, {}
    for part, count in (("train", 7), ("t10k", 5)):
        pixels[part] = generator.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels[part] = generator.integers(10, size=count, dtype=np.uint8)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{end}", pixels[part], compressed)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{end}", labels[part], compressed)
    images = data.load("mnist", tmp_path)
    raw = torch.from_numpy(pixels["train"].astype(np.float32))[:, None]
    assert torch.allclose(images.x_train, (raw - raw.mean()) / raw.std(), atol=1e-5)
    assert images.y_test.tolist() == labels["t10k"].tolist()
    (tmp_path / f"t10k-labels-idx1-ubyte{end}").unlink()
    with pytest.raises(br.Error, match="t10k-labels-idx1-ubyte.gz") as caught:
        data.load("mnist", tmp_path)
    assert isinstance(caught.value, FileNotFoundError)


def test_cifar_binary_files(tmp_path):
    generator = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records[name] = generator.integers(256, size=(4, 3073), dtype=np.uint8)
        records[name][:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records[name].tobytes())
    images = data.load("cifar10", tmp_path)
    assert images.x_train.shape == (20, 3, 32, 32)
    assert images.y_train[:4].tolist() == records["data_batch_1"][:, 0].tolist()
    raw = torch.from_numpy(
        np.concatenate([records[f"data_batch_{i}"][:, 1:] for i in range(1, 6)]).astype(np.float32)
    )
    raw = raw.view(20, 3, 32, 32)
    mean, deviation = raw.mean((0, 2, 3), keepdim=True), raw.std((0, 2, 3), keepdim=True)
    assert torch.allclose(images.x_train, (raw - mean) / deviation, atol=1e-4)
    (folder / "data_batch_3.bin").write_bytes(b"short")
    with pytest.raises(br.Error, match="records of 3,073 bytes"):
        data.load("cifar10", tmp_path)


def test_cifar100_binary_files(tmp_path):
    generator = np.random.default_rng(0)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    records = {name: generator.integers(100, size=(5, 3074), dtype=np.uint8) for name in ("train", "test")}
    for name, record in records.items():
        (folder / f"{name}.bin").write_bytes(record.tobytes())
    with pytest.raises(br.Error, match="cifar-100-binary/fine_label_names.txt"):
        data.load("cifar100", tmp_path)
    names = [f"thing_{i}" for i in range(100)]
    (folder / "fine_label_names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    images = data.load("cifar100", tmp_path)
    assert images.x_train.shape == (5, 3, 32, 32)
    assert images.y_test.tolist() == records["test"][:, 1].tolist()  # the fine label is the second
    assert images.names == tuple(names)
    pixels = images.x_test[0, 1] * images.deviation[1] + images.mean[1]
    assert torch.allclose(pixels.flatten(), torch.from_numpy(records["test"][0, 2 + 1024 : 2 + 2048]).float())


def test_tables(tmp_path, data_folder):
    x, y = data.load_table("diabetes")
    assert x.shape == (442, 10)
    x, y = data.load_table("boston", data_folder)
    assert (x.shape, y.shape) == ((506, 13), (506,))
    assert torch.allclose(x.std(0), torch.ones(13, dtype=x.dtype))
    with pytest.raises(br.Error, match=r"boston_housing\.csv\); looked in the folder"):
        data.load_table("boston", tmp_path)
    table = np.loadtxt(data_folder / "boston_housing.csv", delimiter=",", skiprows=1)
    lines = [
        f" {' '.join(map(repr, row[:11].tolist()))}\n  {' '.join(map(repr, row[11:].tolist()))}"
        for row in table
    ]
    (tmp_path / "boston").write_text("\n".join([*["words 1 2"] * 22, *lines]), encoding="utf-8")
    original, targets = data.load_table("boston", tmp_path)
    assert torch.equal(original, x)
    assert torch.equal(targets, y)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"garbage", "must be whole; one cannot be read"),
        ({"x_train": 4, "y_train": 4, "x_test": 2}, "KeyError"),
        ({"x_train": 4, "y_train": 3, "x_test": 2, "y_test": 2}, "one label each"),
        ({"x_train": 4, "y_train": 4, "x_test": 2, "y_test": 2, "label": 11}, "below 10"),
    ],
    ids=["garbage", "a key is missing", "a label is missing", "a label too many"],
)
def test_damaged_data_files_are_one_sentence(content, words, tmp_path):
    path = tmp_path / "mnist.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        label = content.pop("label", 1)
        arrays = {
            key: np.full((n, 28, 28), 3, np.uint8) if key[0] == "x" else np.full(n, label, np.uint8)
            for key, n in content.items()
        }
        np.savez(path, **arrays)
    with pytest.raises(br.Error, match=words):
        data.load("mnist", tmp_path)


def test_no_folder_of_data_is_said(monkeypatch):
    monkeypatch.delenv("BESTRESPONSE_DATA", raising=False)
    with pytest.raises(br.Error, match="neither --data-dir nor BESTRESPONSE_DATA is set"):
        data.load("cifar10")


@pytest.mark.parametrize(
    ("name", "shape", "weights"),
    [
        ("linear", (1, 28, 28), 7_850),
        ("mlp", (1, 28, 28), 784 * 784 + 784 + 7_850),
        ("mlp", (3, 32, 32), 3072 * 3072 + 3072 + 30_730),
        ("lenet", (1, 28, 28), 61_706),
        ("lenet", (3, 32, 32), 62_006),
        ("resnet44", (3, 32, 32), 658_586),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("resnet8", (1, 8, 8), 19074),
        ("alexnet", (3, 32, 32), 57_023_306),
        ("alexnet", (1, 28, 28), 57_022_154),
    ],
)
def test_models(name, shape, weights):
    with torch.device("meta"):
        model = models.make(name, shape, 10)
        assert model(torch.empty(2, *shape)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == weights


def test_resnet44_has_44_layers():
    model = models.make("resnet44", (3, 32, 32), 10)
    counted = [m for m in model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(counted) == 44


# --- the folder of a run ------------------------------------------------------------------------------------


def test_a_run_begins_its_folder_anew(tmp_path):
    config = {"experiment": "overfit", **runs.as_json(overfit.Overfit(out=tmp_path))}
    runs.begin(tmp_path, config)
    assert runs.add(tmp_path, {"hyper_step": 1, "val_loss": float("nan")}) == {
        "hyper_step": 1,
        "val_loss": None,
    }
    runs.write_whole(tmp_path / "result.json", {"headline": {"x": 1.0}})
    runs.begin(tmp_path, config)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "result.json").exists()
    with pytest.raises(br.Error, match="must hold rows"):
        runs.read_rows(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(br.Error, match="must hold the configuration"):
        catalogue.draw(tmp_path)
    (tmp_path / "config.json").write_text('{"experiment": "other"}')
    with pytest.raises(br.Error, match="'other'"):
        catalogue.draw(tmp_path)
