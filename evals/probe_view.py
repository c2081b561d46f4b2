"""The tables and the picture of the probe."""
from evals.instrument import first_line, legend, table
from evals.measures import MEASURES
from evals.pictures import GREY, SHARES, frame, heat_map, line_panel, powers_of_two, pyplot, save_figure

TOP = {"top": "the largest sink among the heads of the layer, and its head"}
MASSIVE = {"massive": "norm of the first token's hidden state over the others'; the largest ratio at any place"}
IN_JSON = ("density", "entropy")                # left out of the tables, which show row_mass, sink and dispersion
ALWAYS = ("sink", "share", "row_mass")          # shown even if they are 0: each misleads without the others

STREAM = {                                      # columns of the second table
    "norm": "mean norm of the hidden states that enter the layer: the first token's, and the others'",
    "massive": "ratio of the first to the second, mean over sequences",
    "largest": "norm of the token with the largest norm, over the others'",
    "at": "position of that token, counted from 0: the most frequent position, and how frequent it is",
    "channels": "the largest channels of that token, and their values",
    "x median": "the largest of these values over the median magnitude of all hidden states",
    "var": "variance over the channels of a hidden state: the first token's over the others'",
    "var_in": "the same of the input to queries, keys and values (with pre-norm, after the norm)",
    "query": "norm of the first token's query over the others', as they enter the score: after rotation and norms",
    "key": "the same for the keys",
    "value": "the same for the values",
    "cos_qk": "mean cosine of the later queries with the first key, as they enter the score",
    "cos_kk": "mean cosine of the later keys with the first key",
    "spread": "largest distance of a hidden state from the first, over their mean norm",
}


def tell(args, found):
    """The tables of each run, and below them the meanings of the columns."""
    texts, meant = [], {}                       # meant: {kind of table: {column: meaning}}
    for place, numbers in found.items():
        texts += [place] if len(found) > 1 else []
        for kind, text, meanings in tables(numbers, args.heads, args.layer):
            texts.append(text)
            meant[kind] = meant.get(kind, {}) | meanings
    return "\n\n".join([*texts, *(legend(meanings) for meanings in meant.values() if meanings)])


def tables(found, heads, layer):
    """Yield a run's tables: kind, text, and the meanings of the columns. heads: a line for each head; layer: also list
    the positions of this layer, -1 for none."""
    yield "", about(found), {}
    if "lengths" in found:
        lines = {str(line["length"]): line for line in found["lengths"]}
        yield "weights", *measures_table("length", lines, MEASURES | MASSIVE)
        return
    lines, meanings = (head_lines, MEASURES) if heads else (layer_lines, {"sink": MEASURES["sink"]} | TOP | MEASURES)
    left_out = (*IN_JSON, "uniform") if is_even(found) else IN_JSON     # then the first line has "uniform"
    meanings = {name: meaning for name, meaning in meanings.items() if name not in left_out}
    first = "layer.head" if heads else "layer"
    yield "weights", *measures_table(first, lines(found["layers"]) | {"mean": found["mean"]}, meanings)
    yield "stream", stream_table(found["stream"]), STREAM
    if layer >= 0:
        title = f"layer {layer} by position, means over sequences and heads"
        yield "", f"{title}\n{position_table(found['stream'][layer])}", {}


def is_even(found):
    """Does an even spread put the same weight on the first token in all layers? Not if only some have a window."""
    return "lengths" not in found and len({value for layer in found["layers"] for value in layer["uniform"]}) == 1


def about(found):
    """The lines above the tables: the data, and the numbers that are the same in all lines."""
    even = f"an even spread puts {found['mean']['uniform']:.4f} on the first token; " if is_even(found) else ""
    return (f"{first_line(found)}, --input={found['input']}\n"
            f"{even}sink_eps is Sink_{found['k']}^{found['eps']:g}")


# ------------------------------------------------------------------------------------------------- attention's weights


def measures_table(first, lines, meanings):
    """lines {name: {measure: value}} as a table, and the meanings of its columns. Measures that are 0 or 1 in all lines
    are named below the table. Undefined measures are left out."""
    values = {name: [line[name] for line in lines.values() if line.get(name) is not None] for name in meanings}
    zero = [name for name in meanings if name not in ALWAYS and values[name] and not any(values[name])]
    one = [name for name in ("row_mass",) if all(f"{value:.4f}" == "1.0000" for value in values[name])]
    shown = [name for name in meanings if values[name] and name not in zero + one]
    text = table([[key, *(line.get(name) for name in shown)] for key, line in lines.items()], [first, *shown])
    everywhere = [f"{number} everywhere: {', '.join(names)}" for number, names in ((0, zero), (1, one)) if names]
    return "\n".join([text, *everywhere]), {name: meanings[name] for name in shown + one}


def head_lines(layers):
    """{"layer.head": {measure: value}}"""
    return {f"{l}.{h}": {name: values[h] for name, values in layer.items()}
            for l, layer in enumerate(layers) for h in range(len(layer["sink"]))}


def layer_lines(layers):
    """{layer: {measure: mean over its heads, or the largest of peaks}}; "top": the head with the largest sink."""
    return {str(l): {"top": top_head(layer["sink"])} | {name: over_heads(name, layer[name]) for name in MEASURES}
            for l, layer in enumerate(layers)}


def over_heads(name, values):
    if None in values:
        return None
    return max(values) if name.startswith("peak") else sum(values) / len(values)


def top_head(sinks):
    return f"{max(sinks):.2f} ({sinks.index(max(sinks))})"


# ---------------------------------------------------------------------------------------------------------- the stream


def stream_table(places):
    """A line for the stream that enters each layer, and one for the stream after the last."""
    names = [*map(str, range(len(places) - 1)), "end"]
    return table([[name, *stream_row(place)] for name, place in zip(names, places, strict=True)], ["layer", *STREAM])


def stream_row(place):
    """The cells of STREAM; after the last layer, which has no queries, some are dashes."""
    ratio = {name: place[name][0] / place[name][1] for name in place["positions"] if place[name][1]}
    channels = " ".join(f"{channel}:{number(value)}" for channel, value, _ in place["channels"])
    return [" / ".join(map(number, place["hidden_norm"])), number(place["massive"]), number(place["largest"]),
            f"{place['at']} ({place['at_share']:.2f})", channels, number(place["channels"][0][2]),
            *(number(ratio.get(name)) for name in ("hidden_var", "input_var", "query_norm", "key_norm", "value_norm")),
            *(number(place.get(name)) for name in ("cos_qk", "cos_kk", "spread"))]


def number(value):
    """A number with two decimals, or without decimals from 100 on; a dash for None."""
    return "-" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def position_table(place):
    """Norms and variances by position, as Lazy Attention prints them (2601.00919, tables 4 to 7)."""
    rows = {str(i): row for i, row in enumerate(zip(*place["positions"].values(), strict=True))}
    rows["rest"] = [place[name][1] for name in place["positions"]]
    cells = [[name, *(None if value is None else f"{value:.4g}" for value in row)] for name, row in rows.items()]
    return table(cells, ["position", *place["positions"]])


# ----------------------------------------------------------------------------------------------------------- a picture

MAPS = {                                        # {measure: title} of the picture
    "sink": "weight on the first token",
    "value_norm_ratio": "norm of its value over the others'",
    "dispersion": "entropy of the rows over log n",
}


def draw(path, found):
    """Draw a row for each run: MAPS of layers (down) by heads (across) with a number in every cell, the first token in
    the stream, and with --lengths share and dispersion by length."""
    plt = pyplot()
    layers = max(len(numbers["layers"]) for numbers in found.values())
    heads = max(len(numbers["layers"][0]["sink"]) for numbers in found.values())
    curves = 1 + any("lengths" in numbers for numbers in found.values())
    panels = [max(3.2, 1.2 + 0.52 * heads)] * len(MAPS) + [3.6] * curves            # their widths
    size = (sum(panels), len(found) * max(2.6, 1.2 + 0.26 * layers))
    figure, axes = plt.subplots(len(found), len(panels), figsize=size, width_ratios=panels, squeeze=False)
    for (place, numbers), row in zip(found.items(), axes, strict=True):
        for ax, (name, title) in zip(row, MAPS.items(), strict=False):
            cells = [layer[name] for layer in numbers["layers"]]
            heat_map(ax, cells, SHARES, cells)
            ax.set_title(title, fontsize=10)
        draw_stream(row[len(MAPS)], numbers["stream"])
        if "lengths" in numbers:
            draw_lengths(row[-1], numbers["lengths"])
        if len(found) > 1:
            row[0].set_ylabel(f"{place}\nlayer")
    figure.tight_layout()
    save_figure(figure, path)


def draw_stream(ax, places):
    """Draw the first token's norm over the others', layer by layer; if it is massive, also its largest channel."""
    ratios = [place["massive"] for place in places]
    ax.plot(ratios, range(len(ratios)), "o-", color="#08519c", markersize=4)
    ax.axvline(1, color=GREY, linewidth=0.8)
    top = ratios.index(max(ratios))
    channel, value, _ = places[top]["channels"][0]
    if ratios[top] > 3:
        ax.annotate(f"channel {channel}: {number(value)}", (ratios[top], top), xytext=(-8, -12), ha="right",
                    fontsize=8, textcoords="offset points")
    ax.set_xscale("log")
    ax.set_xticks([0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000], [0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000])
    ax.minorticks_off()
    ax.set_xlim(min(0.5, 0.8 * min(ratios)), max(3, 1.3 * ratios[top]))
    ax.set_ylim(len(ratios) - 0.5, -0.5)        # the embeddings are on top
    ax.set_yticks(range(len(ratios)), [*range(len(ratios) - 1), "end"], fontsize=7)
    frame(ax, "norm of its hidden state over the others'", ylabel="enters layer")


def draw_lengths(ax, lines):
    """Draw dispersion, the first token's share, and an even share, by length."""
    lengths = [line["length"] for line in lines]
    ax.plot(lengths, [line["uniform"] for line in lines], "--", color=GREY, label="even share", zorder=3)
    line_panel(ax, {name: (lengths, [line[name] for line in lines]) for name in ("share", "dispersion")},
               "by length, means over heads", "tokens of a window")
    powers_of_two(ax.xaxis)
    ax.set_ylim(0, 1.03)
