"""The page in a real browser: it loads, zooms, lights up, leads from a node to its line, and obeys the keyboard."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from piper.view.provenance import Subject
from piper.view.report import page
from tests.lower.test_collectives import plain
from tests.view.scenes import again, deep, demo, long, measured

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FloatRect, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
expect = sync_api.expect  # waits until what it expects is there
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium")
SLOW_NODE = "B[PP=3 MB=1]"


@dataclass(slots=True)
class Opened:
    """A page, and what it complained of."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    with sync_api.sync_playwright() as playwright:
        expect.set_options(timeout=30_000)
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    subject = demo()
    path.write_text(page(replace(subject, measured=measured(subject, SLOW_NODE))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def window(chromium: "Browser") -> Opened:
    """A window of a laptop's size that all tests use, one after another."""
    found = Opened(page=chromium.new_page(viewport={"width": 1280, "height": 800}))
    found.page.on("console", lambda message: found.complaints.append(message.text))
    found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.page.on("request", lambda request: found.requests.append(request.url))
    return found


@pytest.fixture
def opened(window: Opened, file: Path) -> Iterator[Opened]:
    """The page, fresh from its file; nothing may complain or ask the network."""
    found = window
    found.complaints.clear()
    found.requests.clear()
    found.page.mouse.move(2, 2)
    found.page.goto(file.as_uri())
    yield found
    assert found.complaints == []
    assert [url for url in found.requests if not url.startswith(("file:", "data:"))] == []


def ink(page: "Page", scene: str) -> str:
    """What a canvas shows, once it is drawn and the next frame is the same: it is drawn when it is seen to be in sight."""
    drawn: str | None = page.evaluate(
        """async (scene) => {
            const canvas = document.querySelector(`#${scene} canvas`);
            let last = null;
            for (let frame = 0; frame < 600; frame += 1) {
                await new Promise((done) => requestAnimationFrame(done));
                const now = canvas.toDataURL();
                const empty = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
                if (now === last && now !== empty.toDataURL()) return now;
                last = now;
            }
            return null;
        }""",
        scene,
    )
    assert drawn is not None, f"{scene} is not drawn, or never comes to rest"
    return drawn


def ink_other_than(page: "Page", scene: str, *known: str) -> str:
    """What a canvas shows as soon as it is none of these: what acts on a page returns before the page has answered."""
    for _ in range(100):
        if (now := ink(page, scene)) not in known:
            return now
    raise AssertionError(f"{scene} shows what it did before")


def expect_ink(page: "Page", scene: str, wanted: str) -> None:
    """Wait until a canvas shows this."""
    for _ in range(100):
        if ink(page, scene) == wanted:
            return
    raise AssertionError(f"{scene} does not show what it did before")


def ink_after_wheel(page: "Page", scene: str, turned: int) -> str:
    """What a canvas shows when a wheel has changed it: one that comes while the page scrolls is turned again."""
    before = ink(page, scene)
    for _ in range(20):
        page.mouse.wheel(0, turned)
        for _ in range(10):
            if (now := ink(page, scene)) != before:
                return now
    raise AssertionError("the canvas shows what it did before")


def box_of(page: "Page", scene: str) -> "FloatRect":
    """Where a drawing is on the screen."""
    canvas = page.locator(f"#{scene} canvas")
    canvas.scroll_into_view_if_needed()
    ink(page, scene)  # what is drawn for the first time may grow
    box = canvas.bounding_box()
    assert box is not None
    return box


def press(page: "Page", scene: str, *keys: str) -> None:
    page.locator(f"#{scene} canvas").focus()
    for key in keys:
        page.keyboard.press(key)


def test_a_long_plan_is_long() -> None:
    assert min(len(plan.instrs) for plan in long().plans) > 1000


def test_it_loads_with_everything_on_it(opened: Opened) -> None:
    page = opened.page
    assert page.title() == "moe.py:demo · Piper"
    assert page.locator("h1").inner_text() == "moe.py:demo"
    assert page.locator("#subtitle").inner_text().startswith("4 devices, 2 programs, ")
    assert page.locator("canvas").count() == 5
    assert page.locator("#strategy button").count() == len(demo().strategy)
    assert page.locator("#figures dt").all_inner_texts() == [
        "planned step",
        "measured step",
        "idle, simulated",
        "highest memory",
        "sent in a step",
    ]
    assert page.locator("#comms tbody tr").count() > 3
    for scene in ("pipeline", "devices", "timeline", "memory", "dag"):
        page.locator(f"#{scene} canvas").scroll_into_view_if_needed()
        assert len(ink(page, scene)) > 5000, "more than an empty picture"


def test_wheel_drag_and_buttons_zoom_and_pan(opened: Opened) -> None:
    page = opened.page
    whole = ink(page, "pipeline")
    box = box_of(page, "pipeline")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    zoomed = ink_after_wheel(page, "pipeline", -400)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 150, box["y"] + 20, steps=4)
    page.mouse.up()
    ink_other_than(page, "pipeline", zoomed, whole)
    page.mouse.move(2, 2)
    page.get_by_role("button", name="Show all: pipeline").click()
    expect_ink(page, "pipeline", whole)
    page.get_by_role("button", name="Zoom in: pipeline").click()
    ink_other_than(page, "pipeline", whole)


def test_a_wheel_that_has_nothing_to_zoom_out_of_scrolls_the_page(opened: Opened) -> None:
    page = opened.page
    box = box_of(page, "pipeline")
    page.mouse.move(box["x"] + 300, box["y"] + 20)
    page.mouse.wheel(0, 300)
    scrolled = page.evaluate(  # not by `wait_for_function`: the page allows no evaluation of strings
        """async () => {
            for (let i = 0; i < 1500 && scrollY <= 100; i += 1) await new Promise((done) => setTimeout(done, 20));
            return scrollY;
        }"""
    )
    assert scrolled > 100


def test_pointing_at_a_directive_lights_up_what_it_touched(opened: Opened) -> None:
    page = opened.page
    plain = ink(page, "pipeline")
    page.locator("[data-directive='0']").hover()
    lit = ink_other_than(page, "pipeline", plain)
    page.locator("[data-directive='2']").hover()
    ink_other_than(page, "pipeline", lit, plain)
    page.mouse.move(2, 2)
    expect_ink(page, "pipeline", plain)


def test_a_click_leads_from_a_cell_to_the_directive_and_its_line(opened: Opened) -> None:
    page = opened.page
    box = box_of(page, "pipeline")
    page.mouse.click(box["x"] + box["width"] - 16, box["y"] + 20)  # the last cell ends where the drawing does
    details = page.locator("#details")
    expect(details.locator(".what")).to_have_text("weight gradients, stage 0, microbatch 3")
    details.get_by_role("button", name="replicate #0 (moe.py:4)").click()
    expect(page.locator("#strategy .pinned")).to_have_attribute("data-directive", "0")
    expect(page.locator("#source .lit")).to_have_attribute("data-line", "4")
    details.get_by_role("button", name="BI[PP=0 #1 MB=3]").first.click()
    expect(details.locator(".what")).to_have_text("BI[PP=0 #1 MB=3]")


def test_the_pipeline_is_drawn_in_units_and_in_simulated_time(opened: Opened) -> None:
    page = opened.page
    caption, units = page.locator("#pipeline-caption"), ink(page, "pipeline")
    assert caption.inner_text() == "25 units, 4.0 % idle"
    page.get_by_role("button", name="Simulated time").click()
    ink_other_than(page, "pipeline", units)
    idle = page.locator("#figures div:nth-child(3) dd").inner_text()
    assert caption.inner_text().endswith(f" on h100, {idle} idle"), "the figure at the top"
    press(page, "pipeline", "End")
    expect(page.locator("#details .what")).to_have_text("weight gradients, stage 0, microbatch 3")
    page.get_by_role("button", name="Units").click()
    page.keyboard.press("Escape")  # the button has the focus
    expect(page.locator("#details .what")).to_have_count(0)
    expect_ink(page, "pipeline", units)
    assert idle in page.locator("#idles").inner_text()
    assert "4.0 %" in page.locator("#idles").inner_text()


def test_all_devices_stand_on_one_axis(opened: Opened) -> None:
    """Two programs, planned, and one measured device of each: four rows of one height."""
    page = opened.page
    box = box_of(page, "devices")
    middle, tip = box["x"] + box["width"] / 2, page.locator("#tip")
    for row, name in enumerate(["devices 0,1", "device 0", "devices 2,3", "device 2"]):
        page.mouse.move(middle, box["y"] + 15 + 39 * row)
        expect(tip.locator("div").last).to_have_text(name)
    page.locator("#timeline canvas").scroll_into_view_if_needed()
    whole = ink(page, "devices"), ink(page, "timeline")
    page.get_by_role("button", name="Zoom in: devices").click()
    ink_other_than(page, "devices", whole[0])
    page.locator("#timeline canvas").scroll_into_view_if_needed()
    ink_other_than(page, "timeline", whole[1])  # the streams follow
    page.get_by_role("button", name="Show all: devices").click()
    page.mouse.click(middle, box_of(page, "devices")["y"] + 15 + 39 * 3)
    expect(page.locator("#device")).to_have_value("2")
    expect(page.locator("#details")).to_contain_text("on devices 2,3, stream compute", use_inner_text=True)
    press(page, "devices", "ArrowUp")
    expect(page.locator("#device")).to_have_value("0")


def test_planned_and_measured_are_compared_in_words(opened: Opened) -> None:
    words = opened.page.locator("#compared").inner_text()
    assert words.startswith("Measured ")
    assert "Most of the difference is computing." in words
    assert "The plan takes its times from h100" in words


def test_a_selection_dims_all_but_what_it_needs_and_what_needs_it(opened: Opened) -> None:
    page = opened.page
    plain = ink(page, "pipeline"), ink(page, "devices")
    press(page, "pipeline", "Home")
    expect(page.locator("#details .what")).to_have_text("forward, stage 0, microbatch 0")
    ink_other_than(page, "pipeline", plain[0])
    ink_other_than(page, "devices", plain[1])
    first, second = (colours_at(page, "pipeline", unit) for unit in (0, 1))
    assert first == {"195,219,254"}, "F of microbatch 0 in its own colour"
    assert second != {"182,232,191"}, "F of microbatch 1 is dimmed"
    press(page, "pipeline", "Escape")
    expect_ink(page, "pipeline", plain[0])
    expect_ink(page, "devices", plain[1])
    assert colours_at(page, "pipeline", 1) == {"182,232,191"}


def test_a_transfer_leads_to_the_device_at_its_other_end(opened: Opened) -> None:
    page = opened.page
    details = page.locator("#details")
    press(page, "pipeline", "ArrowDown", "ArrowDown", "Home")
    expect(details.locator(".what")).to_have_text("forward, stage 1, microbatch 0")
    details.get_by_role("button", name="transfer[PP=0 #1.out0[MB=0] @0,1 -> @2,3]").click()
    expect(details).to_contain_text("receive")
    details.get_by_role("button", name="send on devices 0,1").click()
    expect(page.locator("#device")).to_have_value("0")
    expect(details.get_by_role("button", name="receive on devices 2,3")).to_have_count(1)


def test_strategy_and_source_scroll_and_follow_the_selection(chromium: "Browser", tmp_path: Path) -> None:
    """A recipe of 200 lines whose last lines are the strategy, in a low window."""
    subject = demo()
    strategy = tuple(
        replace(said, title=f"{said.title.split(' (')[0]} (moe.py:{180 + n})", source=f"moe.py:{180 + n}")
        for n, said in enumerate(subject.strategy)
    )
    source = "".join(f"line = {n}\n" for n in range(1, 201))
    file = tmp_path / "scrolls.html"
    file.write_text(page(replace(subject, strategy=strategy, source=source)), encoding="utf-8")
    opened = chromium.new_page(viewport={"width": 1280, "height": 700})
    opened.goto(file.as_uri())
    assert opened.evaluate("document.querySelector('aside').getBoundingClientRect().bottom") <= 700
    for panel in ("strategy", "source"):
        assert opened.evaluate("(id) => document.getElementById(id).scrollHeight", panel) > opened.evaluate(
            "(id) => document.getElementById(id).clientHeight", panel
        )
    press(opened, "pipeline", "End")
    lit = opened.locator("#source .lit")
    expect(lit.first).to_be_attached()
    made = opened.locator("#details .link", has_text="moe.py:").all_inner_texts()
    wanted = sorted({int(title.rpartition(":")[2].rstrip(")")) for title in made})
    assert lit.evaluate_all("(lines) => lines.map((line) => Number(line.dataset.line))") == wanted
    assert wanted[0] >= 180
    for inside in (lit.first, opened.locator("#strategy .lit").first):
        assert inside.evaluate(
            """(child) => {
                const [line, box] = [child, child.closest("pre, ol")].map((one) => one.getBoundingClientRect());
                return line.top >= box.top - 1 && line.bottom <= box.bottom + 1;
            }"""
        )
    press(opened, "pipeline", "Escape")
    expect(lit).to_have_count(0)
    opened.close()


def test_paper_has_every_drawing_with_all_dependencies_and_no_selection(
    chromium: "Browser", file: Path
) -> None:
    """The window is too low for most drawings, the page is dark, and something is selected."""
    page = chromium.new_page(viewport={"width": 1280, "height": 300}, color_scheme="dark")
    page.goto(file.as_uri())
    ink(page, "pipeline")
    page.evaluate(  # in one go: the page is printed before it has drawn the selection
        """() => {
            const key = new KeyboardEvent("keydown", { key: "Home", bubbles: true });
            document.querySelector("#pipeline canvas").dispatchEvent(key);
            dispatchEvent(new Event("beforeprint"));
        }"""
    )
    assert colours_at(page, "pipeline", 1) == {"182,232,191"}, "in light colours, not dimmed"
    page.emulate_media(media="print")
    drawn: dict[str, int] = page.evaluate(
        """() => Object.fromEntries(["pipeline", "devices", "timeline", "memory"].map((scene) => {
            const canvas = document.querySelector(`#${scene} canvas`);
            return [scene, canvas.toDataURL().length];
        }))"""
    )
    assert min(drawn.values()) > 5000
    lines = page.locator("#dag-print canvas")
    assert lines.count() == 10
    assert min(lines.evaluate_all("(all) => all.map((one) => one.toDataURL().length)")) > 5000
    assert not page.locator("#dag canvas").is_visible()
    assert page.locator("#strategy").is_visible()
    assert not page.locator("#details").is_visible()
    page.set_viewport_size({"width": 700, "height": 300})  # as narrow as paper
    assert page.evaluate(
        """() => {
            const [last, panel] = ["#strategy li:last-child", "#strategy-panel"].map((one) => document.querySelector(one));
            return last.getBoundingClientRect().bottom < panel.getBoundingClientRect().bottom;
        }"""
    ), "the panel holds the whole strategy"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    expect(lines).to_have_count(0)
    expect(page.locator("#details .what")).to_have_text("forward, stage 0, microbatch 0")
    page.close()


def test_the_tip_tells_planned_and_measured(opened: Opened) -> None:
    page = opened.page
    box = box_of(page, "timeline")
    page.mouse.move(box["x"] + 150, box["y"] + 12)
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("planned at")
    expect(tip).to_contain_text("measured at")
    page.mouse.move(2, 2)
    expect(tip).to_be_hidden()


def test_differences_are_listed_and_lead_to_their_node(opened: Opened) -> None:
    page = opened.page
    first = page.locator("#differences-table tbody tr").first
    assert first.locator("td").first.inner_text() == SLOW_NODE
    first.get_by_role("button").click()
    expect(page.locator("#details .what")).to_have_text(SLOW_NODE)
    expect(page.locator("#details")).to_contain_text("times its planned share of the step")


def test_the_keyboard_reaches_everything(opened: Opened) -> None:
    page = opened.page
    what = page.locator("#details .what")
    press(page, "timeline", "ArrowRight")
    first = what.inner_text()
    press(page, "timeline", "ArrowRight")
    expect(what).not_to_have_text(first)
    press(page, "timeline", "ArrowLeft")
    expect(what).to_have_text(first)
    expect(page.locator("#live")).to_contain_text(first)
    press(page, "timeline", "ArrowDown")
    expect(page.locator("#details")).not_to_contain_text("stream compute")
    whole = ink(page, "timeline")
    press(page, "timeline", "+", "+")
    ink_other_than(page, "timeline", whole)
    press(page, "timeline", "0")
    expect_ink(page, "timeline", whole)
    press(page, "dag", "End", "Enter")
    expect(page.locator("#details-title")).to_be_focused()
    press(page, "pipeline", "Home")
    expect(what).to_have_text("forward, stage 0, microbatch 0")
    press(page, "pipeline", "Escape")
    expect(what).to_have_count(0)


def test_another_device_changes_every_drawing_of_one_device(opened: Opened) -> None:
    page = opened.page
    page.locator("#timeline canvas").scroll_into_view_if_needed()
    before = ink(page, "timeline")
    page.select_option("#device", "2")
    ink_other_than(page, "timeline", before)
    expect(page.locator("#memory-caption")).to_contain_text("devices 2,3")


def test_tables_say_what_drawings_show(opened: Opened) -> None:
    page = opened.page
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    rows = page.locator("#instructions-table tbody tr")
    assert rows.count() == len(demo().plans.plans[0].instrs)
    assert page.locator("#pipeline-table tbody tr").count() == 2
    assert page.locator("#edges-table tbody tr").count() > 100
    assert page.locator("th:not([scope])").count() == 0


def test_nothing_speaks_of_forwards_that_run_again_where_none_does(opened: Opened) -> None:
    page = opened.page
    assert "forward again" not in page.locator("body").inner_text()
    assert page.locator("#phases span").all_inner_texts() == [
        "forward",
        "backward",
        "input gradients",
        "weight gradients",
        "overlapped pair",
        "idle",
        "a colour per microbatch",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_forward_that_runs_again_is_told_from_the_first(
    chromium: "Browser", tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    file = tmp_path / "again.html"
    file.write_text(page(again()), encoding="utf-8")
    opened = chromium.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    opened.goto(file.as_uri())
    legend = opened.locator("#phases span")
    assert legend.all_inner_texts()[:3] == ["forward", "forward again", "backward"]
    assert "45deg" in (legend.nth(1).locator("i").get_attribute("style") or "")
    first, second = (
        colours_at(opened, "pipeline", cell) for cell in (0, 2)
    )  # 0F0 0F1 0R0: one microbatch, one hue
    assert len(first) == 1
    assert first < second, "lines over the same fill"
    press(opened, "pipeline", "Home", "ArrowRight", "ArrowRight")
    details = opened.locator("#details")
    expect(details.locator(".what")).to_have_text("forward again, stage 0, microbatch 0")
    details.get_by_role("button", name="R[PP=0 MB=0]", exact=True).click()
    expect(details).to_contain_text("compute, forward again")
    expect(details.get_by_role("button", name="remat #2 (moe.py:4)")).to_have_count(1)
    opened.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert "0F0 0F1 0R0 0B0" in opened.locator("#pipeline-table").inner_text()
    assert "compute, forward again" in opened.locator("#path").inner_text()
    opened.close()


@pytest.mark.slow
def test_a_page_of_a_divided_region_names_its_collectives(chromium: "Browser", tmp_path: Path) -> None:
    file = tmp_path / "divided.html"
    plain(between=1).view().save(file)
    opened = chromium.new_page(viewport={"width": 1280, "height": 800})
    opened.goto(file.as_uri())
    does = opened.locator("#comms tbody tr td:nth-child(2)").all_inner_texts()
    assert {"all-gather", "reduce-scatter"} < set(does)
    assert opened.locator("canvas").count() == 5
    opened.close()


def colours_at(page: "Page", scene: str, unit: int) -> set[str]:
    """The colours at the lower edge of a cell of the first row of the pipeline, where no number stands."""
    ink(page, scene)
    found: list[str] = page.evaluate(
        """([scene, unit]) => {
            const canvas = document.querySelector(`#${scene} canvas`);
            const { pipeline } = JSON.parse(document.getElementById("facts").textContent);
            const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
            const pen = copy.getContext("2d", { willReadFrequently: true });
            pen.drawImage(canvas, 0, 0);
            pen.font = "12px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', 'DejaVu Sans', sans-serif";
            const left = 12 + Math.ceil(Math.max(...pipeline.names.map((name) => pen.measureText(name).width)));
            const fine = canvas.width / canvas.clientWidth;
            const wide = (canvas.clientWidth - 8 - left) / pipeline.end;
            const row = pen.getImageData(fine * (left + (unit + 0.25) * wide), fine * 30, (fine * wide) / 2, 1).data;
            return Array.from({ length: row.length / 4 }, (_, i) => row.slice(4 * i, 4 * i + 3).join());
        }""",
        [scene, unit],
    )
    return set(found)


def test_a_cell_of_several_chunks_is_selected_as_a_whole(opened: Opened) -> None:
    """All instructions of the stage are outlined and listed, and each leads to itself."""
    page = opened.page
    details = page.locator("#details")
    press(page, "pipeline", "Home")
    expect(details).to_contain_text("runs")
    cell = page.evaluate(
        "JSON.parse(document.getElementById('facts').textContent).pipeline.rows[0].places[0].length"
    )
    assert cell > 1
    expect(page.locator("#live")).to_contain_text(
        f"forward, stage 0, microbatch 0, {cell} instructions, from "
    )
    details.get_by_role("button", name="F[PP=0 #1 MB=0]", exact=True).click()
    expect(details.locator(".what")).to_have_text("F[PP=0 #1 MB=0]")


def test_a_run_shows_its_losses(chromium: "Browser", tmp_path: Path) -> None:
    file = tmp_path / "losses.html"
    losses = tuple((step, 4.0 / step) for step in range(1, 21))
    file.write_text(page(replace(demo(), losses=losses)), encoding="utf-8")
    opened = chromium.new_page(viewport={"width": 1280, "height": 800})
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(file.as_uri())
    assert opened.locator("#loss-caption").inner_text() == "4 in step 1, 0.2 in step 20"
    box = box_of(opened, "loss")
    opened.mouse.move(box["x"] + box["width"] - 10, box["y"] + 40)
    expect(opened.locator("#tip")).to_have_text("loss 0.2step 20")
    whole = ink(opened, "loss")
    press(opened, "loss", "+")
    ink_other_than(opened, "loss", whole)
    assert complaints == []
    opened.close()


def test_everything_that_acts_has_a_name(opened: Opened) -> None:
    unnamed: list[str] = opened.page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, canvas, section")]
            .filter((node) => !(node.innerText || node.getAttribute("aria-label") || node.labels?.length
                || node.getAttribute("aria-labelledby")))
            .map((node) => node.outerHTML)"""
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1920])
def test_nothing_is_wider_than_the_screen(
    chromium: "Browser", file: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(14, 17, 22)"}[scheme]
    page.get_by_role("button", name="Colour scheme: auto").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.close()


def test_a_touch_screen_pans(chromium: "Browser", file: Path) -> None:
    context = chromium.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(file.as_uri())
    box = box_of(page, "pipeline")
    page.touchscreen.tap(box["x"] + 120, box["y"] + 20)
    expect(page.locator("#details .what")).to_have_count(1)
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("large", [deep, long])
def test_a_large_page_is_small_and_zooms(
    chromium: "Browser", tmp_path: Path, large: Callable[[], Subject]
) -> None:
    file = tmp_path / "large.html"
    subject = large()
    file.write_text(page(subject), encoding="utf-8")
    assert file.stat().st_size < 5_000_000
    opened = chromium.new_page(viewport={"width": 1280, "height": 800})
    opened.goto(file.as_uri())
    opened.on("pageerror", lambda error: pytest.fail(str(error)))
    for scene in ("pipeline", "devices", "timeline", "dag"):
        opened.locator(f"#{scene} canvas").scroll_into_view_if_needed()
        whole = len(ink(opened, scene))
        press(opened, scene, "+", "+", "+", "-", "ArrowRight", "0")
        assert len(ink(opened, scene)) > 5000, f"{whole} before"
    opened.close()
