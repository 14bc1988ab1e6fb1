"""Look at training images as a run saw them: its pseudo-labels, CLIP's views, its attention

    python show.py runs/voc-vlpl-s0-20261116-093000
    python show.py runs/voc-lac-s0-20261116-101500 --images 7 20
    python show.py runs/voc-an-s0-20261116-111500 --probabilities

Draws what the run has. pseudo.png: images, and the pseudo-labels of the last epoch on bars of the best model's
probabilities or, if CLIP's scores of whole images made them, on bars of those. views.png: the tiles of the first image
in the last round of pseudo-labels, and CLIP's scores of them. attention.png: where the classes look in the first image.
probabilities.png, of any run: what the best model predicts for observed and hidden labels of all training images.
The run's copy of its script is executed, so open only runs that you trust.
"""

import inspect
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro

import common
import data_prep
import predict

EVENLY_SPACED = 8  # images, if none are named
ON_A_FIGURE = 200  # images; no more fit
BINS = 25  # of a histogram of probabilities
KINDS = {"observed positives": "#0072b2", "hidden positives": "#e69f00", "hidden negatives": "#8a8a8a"}  # Okabe and Ito
FOR_VIEWS = ("class_embeddings", "draw_views", "tile_boxes", "score_views", "aggregate", "deciding_scores")
FOR_VIEWS += ("damp_pseudo_labels",)

# ---- 1. Settings


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # a run directory
    images: tuple[int, ...] = ()  # rows of the training set (none: 8, evenly spaced)
    probabilities: bool = False  # distributions of the best model's predictions for all training images
    out: str = ""  # folder of the pictures if not the run directory
    data_root: str = ""  # folder of the data sets if not that of the run
    device: str = "auto"  # device: auto, cpu, cuda, cuda:1, ...


# ---- 2. What the run saw


def load_data(settings, working_directory, device):
    """The run's data. From here on relative paths are those of the run, where its data set is found so."""
    folder = common.dataset_folder(settings)
    if Path(working_directory).is_dir() and Path(working_directory, folder).is_dir():
        os.chdir(working_directory or ".")
    if not folder.is_dir():  # before load() makes scenes
        common.die(f"{folder} not found: pass the folder of the data sets as --data_root")
    return common.load(settings, device)


def find_rows(given, n):
    """--images, or evenly spaced ones -> rows of the training set"""
    for row in given:
        if not 0 <= row < n:
            common.die(f"--images {row}: there are training images 0 to {n - 1}")
    if len(given) > ON_A_FIGURE:
        common.die(f"--images: a picture holds up to {ON_A_FIGURE}, not {len(given)}")
    return np.array(given) if given else np.linspace(0, n - 1, min(EVENLY_SPACED, n)).astype(int)


def gives_attention(model):
    embeddings = getattr(model, "embeddings", None)
    return callable(embeddings) and "weights" in inspect.signature(embeddings).parameters


def observed_names(data, row):
    names = [data.classes[c] for c in data.train.z[row].nonzero().flatten()]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "nothing"


def is_there(data, row, c):
    """The true label, None where nobody knows it"""
    return None if data.train.y is None else bool(data.train.y[row, c])


@torch.no_grad()
def count_probabilities(model, data, loader):
    """-> how many labels of each kind (KINDS) and class have a probability in each bin, (3, C, BINS), and the sums of
    their probabilities, (3, C). Where nobody knows the true labels all hidden ones count as negatives"""
    split, n_classes = data.train, len(data.classes)
    counts, sums, batches = 0, 0, common.in_batches(np.arange(len(split)))
    for idx, x in zip(batches, common.progress(loader.pixels(split, batches), "evaluating", total=len(batches))):
        p, z = model(x).sigmoid(), split.z[idx]
        hidden_positive = torch.zeros_like(z) if split.y is None else split.y[idx]
        kind = torch.where(z == 1, 0, torch.where(hidden_positive == 1, 1, 2))
        place = kind * n_classes + torch.arange(n_classes, device=p.device)  # (B, C)
        bins = (p * BINS).long().clamp(max=BINS - 1)
        counts += (place * BINS + bins).flatten().bincount(minlength=3 * n_classes * BINS).cpu()
        sums += place.flatten().bincount(p.flatten().double(), minlength=3 * n_classes).cpu()
    return counts.view(3, n_classes, BINS).numpy(), sums.view(3, n_classes).numpy()


# ---- 3. Pictures


def verdict(observed, pseudo, there):
    """What became of a label -> words, colour"""
    if observed:
        return "observed", "lightskyblue"
    if not pseudo:
        return "present, not accepted" if there else "", "lightgrey"
    right = None if there is None else there == (pseudo == 1)
    words = {True: "right", False: "wrong", None: "accepted"}[right]
    colour = {True: "lightgreen", False: "salmon", None: "gold"}[right]
    return words if pseudo == 1 else f"negative, {words}", colour


def classes_of_pseudo(scores, pseudo, z):
    """Those that pseudo.png shows: observed ones, pseudo-positives, the highest of the others and pseudo-negatives"""
    order = scores.argsort(descending=True, stable=True)
    observed, positives, negatives = (order[mask[order]] for mask in (z == 1, pseudo == 1, pseudo == -1))
    top = max(5, min(len(positives) + 1, 10))
    groups = order[:top], observed[:10], positives[:10], negatives[:3]
    shown = {c for group in groups for c in group.tolist()}
    return [c for c in order.tolist() if c in shown]


def draw_pseudo(path, data, rows, pixels, scores, pseudo, title):
    """Images (B, H, W, 3) beside their classes' scores (B, C), coloured by what became of the labels (B, C)"""
    plt, wide, z = data_prep.pyplot(), min(len(rows), 4), data.train.z
    shown = [classes_of_pseudo(scores[i], pseudo[i], z[row].cpu()) for i, row in enumerate(rows)]
    high, most = -(-len(rows) // wide), max(map(len, shown))
    size = 4.6 * wide, max(2.2, 0.22 * most) * high + 0.3
    figure, axes = plt.subplots(high, 2 * wide, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for i, (row, (picture, bars)) in enumerate(zip(rows, axes.reshape(-1, 2))):
        picture.imshow(pixels[i])
        picture.set_title(f"{row}, observed: {observed_names(data, row)}", fontsize=8)
        for place, c in enumerate(shown[i]):
            words, colour = verdict(z[row, c] == 1, pseudo[i, c].item(), is_there(data, row, c))
            bars.barh(place, scores[i, c].item(), color=colour)
            words = f" {data.classes[c]} {scores[i, c]:.2f}" + (f" ({words})" if words else "")
            bars.text(0, place, words, va="center", fontsize=7)
        bars.set(xlim=(0, 1), ylim=(most - 0.4, -0.6))
    figure.suptitle(title, fontsize=9)
    data_prep.save_figure(figure, path)


def classes_of_views(final, pseudo, z, k):
    """Those that views.png shows: the observed ones, the highest scores, the lowest of the pseudo-negatives"""
    order = final.argsort(descending=True, stable=True)
    top, negatives = order[: max(8, k)].tolist(), order[pseudo[order] == -1][-10:].tolist()
    return [c for c in order.tolist() if c in top or c in negatives or z[c] == 1]


def draw_views(path, script, clip, cache, data, row, pixels, epoch, args):
    """Tran et al. 2025, supplement, Fig. 1: an image with its tiles, the tiles, and the scores that decide"""
    plt, split, g = data_prep.pyplot(), data.train, args.grid
    text = script.class_embeddings(clip, common.prompts(args.prompt, data.classes), cache, args, clip.device)
    scored = script.score_views(cache.loader, clip, text, split, np.array([row]), epoch, args)
    idx, views, s_global, s_local = next(scored)
    z = split.z[idx]
    pseudo = script.damp_pseudo_labels(s_global, s_local, z, args.nu, args.zeta_global, args.k, args.delta)[0]
    together = script.aggregate(s_global, s_local, z, args.nu)[0]
    final, average = (scores[0] for scores in script.deciding_scores(s_global, s_local, z, args.nu))
    s_global, s_local, z = s_global[0], s_local[0], z[0]
    grown, _ = script.draw_views(len(split), g, args.grow, args.seed, epoch)

    figure = plt.figure(figsize=(15, 5.2), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1, 1, 1.1))
    whole, bars = left.subplots(), right.subplots()
    whole.imshow(pixels)
    for x0, y0, x1, y1 in script.tile_boxes(grown[[row]], g, len(pixels))[0].tolist():
        whole.add_patch(plt.Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, fill=False, color="gold", linewidth=1))
    whole.set_title(f"training image {row}, observed: {observed_names(data, row)}", fontsize=9)
    whole.axis("off")
    for axis, view, scores in zip(middle.subplots(g, g, squeeze=False).flat, views[0, 1:], s_local):
        axis.imshow(view.permute(1, 2, 0).cpu().numpy())
        axis.set_title(f"{data.classes[scores.argmax()]} {scores.max():.2f}", fontsize=7)
        axis.axis("off")
    middle.suptitle(f"its tiles in epoch {epoch}, and CLIP's highest score of each", fontsize=9)
    shown = classes_of_views(final, pseudo, z, args.k)
    series = {"whole image": s_global, "tiles together": together, "decides +": final, "decides −": average}
    for shift, (name, scores) in zip((-0.3, -0.1, 0.1, 0.3), series.items()):
        bars.barh([place + shift for place in range(len(shown))], scores[shown].tolist(), height=0.18, label=name)
    mark = lambda c: "observed" if z[c] == 1 else {1: "+", -1: "−", 0: ""}[pseudo[c].item()]
    there = lambda c: " (present)" if is_there(data, row, c) else ""
    bars.set_yticks(range(len(shown)), [f"{mark(c)} {data.classes[c]}{there(c)}" for c in shown])
    bars.tick_params(labelsize=8)
    bars.axvline(args.zeta_global, color="grey", linestyle=":", linewidth=1, label="zeta_global")
    bars.set(xlim=(0, None), ylim=(len(shown) - 0.4, -0.6))
    bars.set_title("scores; + and − became pseudo-labels", fontsize=9)
    bars.legend(frameon=False, fontsize=8)
    data_prep.save_figure(figure, path)


def draw_attention(path, model, data, row, pixels, device):
    """Xie et al. 2022, Fig. 6: an image, and where its observed class and the five most probable others look"""
    plt, p = data_prep.pyplot(), predict.probabilities(model, pixels[None], device)[0]
    with torch.no_grad():
        _, maps = model.embeddings(common.as_pixels(common.as_tensor(pixels[None]).to(device)), weights=True)
    maps = F.interpolate(maps.float(), pixels.shape[:2], mode="bilinear")[0].cpu()
    observed = data.train.z[row].nonzero().flatten().tolist()
    classes = observed + [c for c in p.argsort(descending=True).tolist() if c not in observed][:5]
    figure, axes = plt.subplots(1, 1 + len(classes), figsize=(2.2 * (1 + len(classes)), 2.75), layout="constrained")
    for axis in axes:
        axis.imshow(pixels)
        axis.axis("off")
    axes[0].set_title(f"training image {row}", fontsize=9)
    for axis, c in zip(axes[1:], classes):
        there = {True: "present", False: "absent", None: ""}[is_there(data, row, c)]
        axis.imshow((maps[c] / maps[c].max()).numpy(), cmap="inferno", alpha=0.65, vmin=0, vmax=1)
        axis.set_title(f"{data.classes[c]} {p[c]:.2f}\n{'observed' if c in observed else there}", fontsize=9)
    data_prep.save_figure(figure, path)


def draw_probabilities(path, data, counts, sums):
    """Zhou et al. 2022, Fig. 2(c), 2(d), 8: densities of the probabilities over all classes and of the class with the
    most hidden positives, and which share of each class's hidden labels is positive. -> {kind: number, mean}"""
    plt, known, labels = data_prep.pyplot(), data.train.y is not None, counts.sum(2)  # (3, C)
    names, edges = [*KINDS] if known else ["observed positives", "", "unobserved labels"], np.linspace(0, 1, BINS + 1)
    most = labels[1 if known else 0].argmax()
    figure, axes = plt.subplots(1, 2 + known, figsize=(4.2 * (2 + known), 3.4), layout="constrained")
    for axis, title, some in zip(axes, ("all classes", data.classes[most]), (slice(None), [most])):
        for name, colour, count, total in zip(names, KINDS.values(), counts[:, some].sum(1), sums[:, some].sum(1)):
            if n := count.sum():
                axis.stairs(count / n * BINS, edges, color=colour, fill=True, alpha=0.25)
                axis.stairs(count / n * BINS, edges, color=colour, label=f"{name}: mean {total / n:.2f}")
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="predicted probability", ylabel="density", yscale="log", xlim=(0, 1))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.legend(frameon=False, fontsize=8)
    if known:
        share = 100 * labels[1] / labels[1:].sum(0).clip(min=1)
        order = share.argsort()[::-1]
        axes[2].bar(range(len(share)), share[order], color=KINDS["hidden positives"])
        axes[2].set_title("positives among the hidden labels, %", fontsize=10)
        axes[2].set_xticks(range(len(share)), [data.classes[c] for c in order], rotation=90)
        axes[2].tick_params(axis="x", labelsize=min(8, 200 / len(share)))
    figure.suptitle("the best model's probabilities of the training images", fontsize=9)
    data_prep.save_figure(figure, path)
    return {name: (n, total / n) for name, n, total in zip(names, labels.sum(1), sums.sum(1)) if n}


# ---- 4. Go

if __name__ == "__main__":
    sys.excepthook = data_prep.explain
    args = tyro.cli(Args, use_underscores=True, description=__doc__)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C, without a traceback
    device = common.find_device(args.device)
    script, config = predict.find_script(args.run)
    model, settings, classes = predict.load_model(args.run, device)
    saved, out = Path(args.run, "last.pt"), Path(args.out or args.run)
    last = common.read_checkpoint(saved) if saved.exists() else {}
    pseudo = last.get("labels", {}).get("pseudo")  # (N, C): 1, -1, 0 = none
    has_pseudo, has_attention = pseudo is not None, gives_attention(model)
    has_views = has_pseudo and all(hasattr(script, f) for f in FOR_VIEWS) and getattr(settings, "damp", True)
    if not (has_pseudo or has_attention or args.probabilities):
        why = "no pseudo-labels in its last.pt, no attention in its model; --probabilities is for any run"
        common.die(f"{args.run} has nothing to show: {why}")

    folder, root = out.absolute(), os.path.abspath(args.data_root) if args.data_root else settings.data_root
    settings = replace(settings, data_root=root)
    data = load_data(settings, config.get("working_directory", ""), device)
    if data.classes != classes or (has_pseudo and pseudo.shape != data.train.z.shape):
        common.die(f"the training images or classes of {settings.dataset} are not those of {args.run}")
    if args.probabilities:
        data_prep.make_folder(folder)
        counts, sums = count_probabilities(model, data, common.Loader(settings, device))
        shown = draw_probabilities(folder / "probabilities.png", data, counts, sums)
        words = [f"{n} {name}, mean probability {mean:.3f}" for name, (n, mean) in shown.items()]
        print(f"{out / 'probabilities.png'}: {'; '.join(words)}")
        sys.exit()
    rows = find_rows(args.images, len(data.train))
    pixels = data.train.images[data.train.rows[rows]]  # uint8 (B, H, W, 3)
    by_clip = has_pseudo and hasattr(script, "clip_cosines")
    clip = common.Clip(settings, device) if by_clip or has_views else None
    cache = common.EmbeddingCache(settings.data_root, common.Loader(settings, device))
    data_prep.make_folder(folder)

    if has_pseudo:
        if by_clip:
            texts = common.prompts(settings.prompt, classes)
            cosine = script.clip_cosines(clip, data, texts, cache)["train"][rows].cpu()
            scores, what = script.clip_scores(cosine, settings.tau), "CLIP's scores"
        else:
            p = [predict.probabilities(model, batch, device) for batch in common.in_batches(pixels)]
            scores, what = torch.cat(p), "the best model's probabilities"
        title = f"{what}, and the pseudo-labels of epoch {last['run']['epoch']}"
        draw_pseudo(folder / "pseudo.png", data, rows, pixels, scores, pseudo[rows], title)
        print(f"{out / 'pseudo.png'}: {len(rows)} training images")
    if has_views:
        epoch = last["run"]["epoch"]
        epoch -= (epoch - 1) % settings.refresh_every  # that of the last round
        draw_views(folder / "views.png", script, clip, cache, data, rows[0], pixels[0], epoch, settings)
        print(f"{out / 'views.png'}: training image {rows[0]}")
    if has_attention:
        draw_attention(folder / "attention.png", model, data, rows[0], pixels[0], device)
        print(f"{out / 'attention.png'}: training image {rows[0]}")
