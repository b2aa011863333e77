"""The report's images: what they were drawn after, what a judge sees, and texts about held-out
images."""

import pytest

from disttrain_cli.analysis.report.generated import generated
from disttrain_cli.api.analysing import samples_in
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.samples import FILE, Answer, Drawn, Judge, Samples, Written
from tests.analysis.report.pages import ATTACK, png


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "images" / "step-000020"
    (folder / "read").mkdir(parents=True)
    for name in ("00", "01", "read/00", "read/01"):
        png(folder / f"{name}.png")
    (tmp_path / "images" / "step-000003").mkdir()
    png(tmp_path / "images" / "step-000003" / "99.png")
    return folder


def write(folder, **more):
    samples = Samples(
        checkpoint="c",
        step=20,
        drawn=[
            Drawn(file="00.png", prompt=f"Draw a two{ATTACK}.", asked="two", recognised="two"),
            Drawn(file="01.png", prompt="Draw a six.", asked="six", recognised="eight"),
        ],
        written=[
            Written(
                prompt="",
                text="7, a seven.",
                image="read/00.png",
                recorded="7, a seven.",
                names_it=True,
            ),
            Written(
                prompt="", text=ATTACK, image="read/01.png", recorded="1, a one.", names_it=False
            ),
        ],
        judge=Judge(name="SVM", accuracy=0.99),
    )
    (folder / FILE).write_text(samples.model_copy(update=more).model_dump_json())


def test_prompts_texts_and_shares_are_shown_of_the_newest_step(folder, tmp_path):
    write(folder)
    images = samples_in(RunDir(tmp_path))
    text = generated(images)
    assert [path.name for path in images] == [
        FILE,
        "00.png",
        "01.png",
        "00.png",
        "01.png",
    ] and text.count("<img alt") == 4
    assert (
        "In 1 of 2 images a judge recognises what the prompt requested (SVM, accuracy 99.0 % on"
        " held-out real images)" in text
    )
    assert "For 1 of 2 images held out of training, the text names what the image shows" in text
    assert "Draw a six. ✗ eight" in text and "7, a seven. ✓" in text and "✗ 1, a one." in text
    assert ATTACK not in text and "<script" not in text


def test_without_a_judge_prompts_alone_and_without_a_description_names(folder, tmp_path):
    write(folder, judge=None, drawn=[Drawn(file="00.png", prompt="Paint.")], written=[])
    text = generated(samples_in(RunDir(tmp_path)))
    assert "Paint." in text and "judge" not in text and text.count("<img alt") == 1
    (folder / FILE).write_text("{")
    assert [path.name for path in samples_in(RunDir(tmp_path))] == ["00.png", "01.png"]
    assert generated(samples_in(RunDir(tmp_path))).count("<figcaption>01<") == 1
    assert samples_in(RunDir(tmp_path / "none")) == [] and generated([]) == ""


def test_answers_stand_beside_those_of_the_data(folder, tmp_path):
    answers = [
        Answer(prompt="Why?", images=["read/00.png", "read/01.png"], text=ATTACK, recorded="So."),
        Answer(prompt="How?", text="Thus.", recorded=""),
    ]
    write(folder, drawn=[], written=[], answers=answers)
    text = generated(samples_in(RunDir(tmp_path)))
    assert "Answers to held-out conversations" in text and text.count("<img alt") == 2
    assert text.index("Why?") < text.index("<td>So.</td>") < text.index("<td>Thus.</td>")
    assert ATTACK not in text and "<script" not in text


@pytest.mark.parametrize("name", ["../../secret.png", "/secret.png"])
def test_files_outside_the_folder_are_not_taken_in(folder, tmp_path, name):
    png(tmp_path / "secret.png")
    write(folder, drawn=[Drawn(file=name, prompt="")])
    assert all(path.parent == folder for path in samples_in(RunDir(tmp_path)))
    write(folder, answers=[Answer(prompt="", images=[name], text="", recorded="")])
    assert all(path.parent == folder for path in samples_in(RunDir(tmp_path)))
    write(folder, written=[Written(prompt="", text="", image=name, recorded="x")])
    assert all(path.parent == folder for path in samples_in(RunDir(tmp_path)))
