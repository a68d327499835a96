// Writes and draws the data of a report: texts and tables, and charts with values at the pointer or arrow keys, and zoom.
"use strict";
{
  const PARTS = {
    input: "waiting for input", host: "host", compile: "compiling", compute: "compute", collective: "collectives", idle: "idle",
  };
  const UNITS = {
    ms: [["µs", 1e-3], ["ms", 1], ["s", 1e3]],
    B: [["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]],
    FLOP: [["FLOP", 1], ["kFLOP", 1e3], ["MFLOP", 1e6], ["GFLOP", 1e9], ["TFLOP", 1e12]],
  };
  const clamp = (value, low = 0, high = 1) => Math.min(Math.max(value, low), high);
  const percent = part => `${Number((100 * part).toFixed(3))}%`;

  // Three digits, and from 1,000 to a million all digits before the point.
  const number = value => {
    const size = Math.abs(value), short = Number(value.toPrecision(3));
    if (size >= 999.5 && size < 1e6) return Math.round(value).toLocaleString("en-US");
    return size && (size < 1e-4 || size >= 1e6) ? short.toExponential() : String(short);
  };
  // A value in words. One that is no finite number comes as words.
  const write = (value, unit) => {
    if (typeof value === "string") return value;
    if (value === null || value === undefined) return "n/a";
    // Of a step, the tenths that have passed.
    if (unit === "count") return (Math.floor(10 * value) / 10).toLocaleString("en-US");
    if (unit === "share") return `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}%`;
    const [name, scale] = UNITS[unit]?.findLast(([, scale]) => Math.abs(value) >= scale) ?? UNITS[unit]?.[0] ?? ["", 1];
    return value && name ? `${number(value / scale)} ${name}` : number(value);
  };
  const say = parts => parts.map(part => (Array.isArray(part) ? write(...part) : part)).join("");

  const made = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
    element.append(...children.flat(2).filter(Boolean));
    return element;
  };
  const html = (name, attributes = {}, ...children) => made(document.createElement(name), attributes, children);
  const svg = (name, attributes = {}, ...children) =>
    made(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  // Long names and code may break after a slash or a dot, and between words in CamelCase.
  const breakable = text => String(text).split(/(?<=\w[./])(?=\w)|(?<=[a-z])(?=[A-Z])/).flatMap((part, index) =>
    (index ? [html("wbr"), part] : [part]));

  const range = (first, last) => Array.from({length: Math.max(last - first + 1, 0)}, (_, index) => first + index);
  const roundGap = gap => {
    const power = 10 ** Math.floor(Math.log10(gap));
    return power * [1, 2, 2.5, 5, 10].find(round => round * power >= gap * (1 - 1e-9));
  };
  // An axis turns values into places from 0 to 1, and back.
  const linear = (low, high, marks) =>
    ({marks, at: value => clamp((value - low) / (high - low)), value: at => low + at * (high - low)});
  // It begins at 0, or is logarithmic where values are far apart.
  const axisOf = (values, unit, logarithmic = false) => {
    const positive = Math.min(...values.filter(value => value > 0));
    const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
    if (logarithmic && low === 0 && high / positive >= 50) {
      const [first, last] = [Math.floor(Math.log10(positive) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
      const every = Math.ceil((last - first) / 6), bottom = 10 ** first, span = Math.log(10 ** (last - first));
      return {
        logarithmic,
        marks: range(first, last).filter(power => (power - first) % every === 0).map(power => Number(`1e${power}`)),
        at: value => (value > 0 ? clamp(Math.log(value / bottom) / span) : 0),
        value: at => bottom * Math.exp(at * span),
      };
    }
    const wanted = (high - low || 1) / 4;
    const gap = unit === "B" ? 2 ** Math.ceil(Math.log2(wanted)) : Math.max(roundGap(wanted), unit === "count" ? 1 : 0);
    const marks = range(Math.floor(low / gap + 1e-9), Math.ceil((high || low + 1) / gap - 1e-9)).map(index => gap * index);
    return linear(marks[0], marks.at(-1), marks);
  };
  const stepsAxis = lines => {
    const steps = lines.flatMap(line => line.steps);
    const [low, high] = [Math.floor(Math.min(...steps)), Math.ceil(Math.max(...steps))];
    const gap = roundGap(Math.max(4, high - low) / 4);
    const marks = range(Math.ceil(low / gap), Math.floor(high / gap)).map(index => gap * index).filter(Number.isInteger);
    return {...(low < high ? linear(low, high, marks) : linear(low - 0.5, high + 0.5, marks)), span: high - low || 1};
  };

  const table = ({caption, heads, rows, class: kind, meter}) => {
    const style = unit => (unit ? {class: "number"} : {});
    const cell = (value, unit) => (value === null ? "–" : value instanceof Node ? value : unit ? write(value, unit) : breakable(value));
    const bar = row => meter && svg("svg", {class: "meter", "aria-hidden": "true"}, svg("rect", {width: percent(row[meter]), height: 4}));
    return html("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption}, html(
      "table",
      {class: kind || undefined},
      html("caption", {}, caption),
      html("thead", {}, html("tr", {}, heads.map(([name, unit]) => html("th", {scope: "col", ...style(unit)}, name)))),
      html("tbody", {}, rows.map(row => html("tr", {}, row.map((value, column) => {
        const unit = heads[column][1];
        return column ? html("td", style(unit), cell(value, unit)) : html("th", {scope: "row"}, cell(value, unit), bar(row));
      })))),
    ));
  };
  const sample = (...shapes) => svg("svg", {class: "sample", "aria-hidden": "true"}, shapes);
  const box = kind => sample(svg("rect", {class: `part ${kind}`, x: 1, y: 1, width: 32, height: 12}));
  const legend = entries => html("ul", {class: "legend"}, entries.map(([shape, name]) => html("li", {}, shape, name)));
  const notes = texts => texts.map(text => html("p", {class: "note"}, text));
  const behind = (summary, title, ...tables) =>
    html("details", {}, html("summary", {}, summary, html("span", {class: "hidden"}, `: ${title}`)), tables);

  // A chart: `marks` are the places and words of its horizontal axis, and `y` is its axis of values in `unit`, if it has
  // one. A stop is where it has values: `at` is its place from 0 to 1, `words` what is there. Zoomed ranges begin and end
  // at multiples of 1 / `grain`, and `ticks` are the marks of one. `points` are places and heights.
  const figure = chart => {
    const {kind, title, label, marks, y, unit, grain, stops, ticks, points, shapes, around = [], rows} = chart;
    const up = svg("g", {}, (y?.marks ?? []).map(value => {
      const place = percent(1 - y.at(value));
      return [
        svg("line", {class: "grid", x1: 0, x2: "100%", y1: place, y2: place}),
        svg("text", {class: "tick", x: -8, y: place, dy: "0.35em", "text-anchor": "end"}, write(value, unit)),
      ];
    }));
    const across = svg("g", {}, marks.map(([at, words]) => [
      y ? "" : svg("line", {class: "grid", x1: percent(at), x2: percent(at), y1: 0, y2: "100%"}),
      svg("text", {class: "tick", x: percent(at), y: "100%", dy: "1.5em", "text-anchor": "middle"}, words),
    ]));
    const content = svg("svg", {class: "content"}, shapes);
    const view = svg("svg", {class: "view"}, content);
    const cursor = svg("line", {class: "cursor", y1: 0, y2: "100%"});
    const selection = svg("rect", {class: "selection"});
    const zoomed = svg("g");
    const plot = svg(
      "svg",
      {class: "plot", role: "img", "aria-label": label, tabindex: 0, "aria-describedby": "keys", style: rows && `--rows: ${rows}`},
      [up, across, view, around, cursor, selection, zoomed],
    );
    const tip = html("p", {class: "tip", role: "status"});
    const reset = html("button", {type: "button"}, "whole range");
    const frame = html("div", {class: "plot-frame"}, plot, tip, reset);
    let from = 0, to = 1, bottom = 0, top = 1, current = null, began = null;

    const hide = () => {
      current?.shape?.classList.remove("at");
      current = null;
      tip.hidden = true;
      cursor.style.display = "none";
    };
    const show = stop => {
      if (stop === current) return;
      hide();
      if (!stop) return;
      current = stop;
      const place = clamp((stop.at - from) / (to - from));
      tip.replaceChildren(...stop.words().map(words => html("span", {}, words)));
      tip.hidden = false;
      const middle = plot.getBoundingClientRect().left - frame.getBoundingClientRect().left + place * plot.clientWidth;
      tip.style.left = place < 0.5 ? `${middle + 10}px` : "";
      tip.style.right = place < 0.5 ? "" : `${frame.clientWidth - middle + 10}px`;
      if (stop.shape) return stop.shape.classList.add("at");
      cursor.style.display = "";
      made(cursor, {x1: percent(place), x2: percent(place)}, []);
    };
    const zoom = (first, last, low = 0, high = 1) => {
      const shown = current;
      hide();
      from = clamp(Math.floor(first * grain + 1e-6) / grain);
      to = clamp(Math.ceil(last * grain - 1e-6) / grain);
      if (to <= from) [from, to] = [0, 1];
      [bottom, top] = points && high - low > 1e-4 ? [clamp(low), clamp(high)] : [0, 1];
      const entire = from === 0 && to === 1, tall = bottom === 0 && top === 1;
      made(content, {
        x: percent(-from / (to - from)), width: percent(1 / (to - from)),
        y: percent((top - 1) / (top - bottom)), height: percent(1 / (top - bottom)),
      }, []);
      view.classList.toggle("zoomed", !(entire && tall));
      across.style.display = entire ? "" : "none";
      up.style.display = tall ? "" : "none";
      reset.hidden = entire && tall;
      zoomed.replaceChildren(...(tall ? [] : [0, 0.5, 1]).map(height => svg(
        "text",
        {class: "tick", x: -8, y: percent(1 - height), dy: "0.35em", "text-anchor": "end"},
        write(y.value(bottom + height * (top - bottom)), unit),
      )), ...(entire ? [] : ticks(from, to)).map(([at, words], index) => svg(
        "text",
        {
          class: "tick", x: percent((at - from) / (to - from)), y: "100%", dy: "1.5em",
          "text-anchor": kind === "steps" ? "middle" : index ? "end" : "start",
        },
        words,
      )));
      if (shown && shown.at >= from && shown.at <= to) show(shown);
    };

    const place = event => {
      const {left, width} = plot.getBoundingClientRect();
      return from + clamp((event.clientX - left) / width) * (to - from);
    };
    const height = event => {
      const box = plot.getBoundingClientRect();
      return top - clamp((event.clientY - box.top) / box.height) * (top - bottom);
    };
    // The heights between which the points in sight are, with a margin.
    const fitted = () => {
      const seen = points.filter(([at]) => at >= from && at <= to).map(([, height]) => height);
      const [low, high] = [Math.min(...seen), Math.max(...seen)];
      const margin = 0.05 * (high - low || 0.1);
      return seen.length ? [low - margin, high + margin] : [0, 1];
    };
    const inside = () => stops.filter(({at}) => at >= from && at <= to);
    const stopAt = event => {
      if (kind === "lanes") return stops.find(({shape}) => shape === event.target);
      const at = place(event);
      const distance = stop => Math.abs(stop.at - at);
      return inside().reduce((best, stop) => (best && distance(best) <= distance(stop) ? best : stop), null);
    };
    // The range that is dragged over, on both axes; all of an axis along which the pointer hardly moved. Fingers scroll.
    const select = event => {
      const ends = [began.place, place(event)].sort((a, b) => a - b);
      const heights = [began.height, height(event)].sort((a, b) => a - b);
      const across = (ends[1] - ends[0]) * plot.clientWidth > 8 * (to - from);
      const along = points && event.pointerType !== "touch" && (heights[1] - heights[0]) * plot.clientHeight > 20 * (top - bottom);
      const [left, right] = across || !along ? ends : [from, to];
      const [low, high] = along ? heights : [bottom, top];
      made(selection, {
        x: percent((left - from) / (to - from)), width: percent((right - left) / (to - from)),
        y: percent((top - high) / (top - bottom)), height: percent((high - low) / (top - bottom)),
      }, []);
      return across || along ? [left, right, low, high] : null;
    };
    const deselect = () => {
      began = null;
      selection.setAttribute("width", 0);
    };
    plot.addEventListener("pointerdown", event => {
      if (event.button) return;
      began = {place: place(event), height: height(event)};
      show(stopAt(event));
    });
    plot.addEventListener("pointermove", event => {
      if (began === null) return show(stopAt(event));
      plot.setPointerCapture(event.pointerId);
      select(event);
    });
    plot.addEventListener("pointerup", event => {
      if (began === null) return;
      const range = select(event);
      deselect();
      if (range) zoom(...range);
    });
    plot.addEventListener("pointercancel", deselect);
    plot.addEventListener("pointerleave", event => event.pointerType === "mouse" && hide());
    plot.addEventListener("dblclick", () => zoom(0, 1));
    plot.addEventListener("blur", hide);
    plot.addEventListener("focus", () => current ?? show(inside()[0]));
    plot.addEventListener("keydown", event => {
      const near = inside();
      const index = near.indexOf(current);
      const at = current ? current.at : (from + to) / 2;
      const half = (to - from) / 2;
      const keys = {
        ArrowRight: () => show(near[Math.min(index + 1, near.length - 1)]),
        ArrowLeft: () => show(near[Math.max(index - 1, 0)]),
        Home: () => show(near[0]),
        End: () => show(near.at(-1)),
        "+": () => zoom(at - half / 2, at + half / 2, bottom, top),
        "-": () => zoom(at - 2 * half, at + 2 * half, bottom, top),
        f: () => points && zoom(from, to, ...fitted()),
        Escape: () => zoom(0, 1),
      };
      if (!Object.hasOwn(keys, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    reset.addEventListener("click", () => zoom(0, 1));
    zoom(0, 1);
    return html("figure", {class: `chart ${kind}`}, html("figcaption", {}, title), frame, chart.below);
  };

  // A line between the gaps of its values that are no numbers, and its points.
  const drawn = (line, style, x, y) => {
    const pieces = [[]], gaps = [];
    line.values.forEach((value, index) => {
      const at = x.at(line.steps[index]);
      if (typeof value === "number") return pieces.at(-1).push([at, y.at(value)]);
      gaps.push(at);
      pieces.push([]);
    });
    const shapes = [svg(
      "svg",
      {x: 0, y: 0, width: "100%", height: "100%", viewBox: "0 0 10000 1000", preserveAspectRatio: "none", class: "free"},
      pieces.filter(piece => piece.length > 1).map(piece => svg("polyline", {
        class: `line line-${style}`,
        points: piece.map(([at, height]) => `${(10000 * at).toFixed()},${(1000 - 1000 * height).toFixed()}`).join(" "),
        "vector-effect": "non-scaling-stroke",
      })),
    )];
    for (const [[at, height]] of pieces.filter(piece => piece.length === 1))
      shapes.push(svg("circle", {class: `point point-${style}`, cx: percent(at), cy: percent(1 - height), r: 3}));
    for (const at of gaps)
      shapes.push(svg("text", {class: "gap", x: percent(at), y: 0, dy: "0.3em", "text-anchor": "middle"}, "✕"));
    return {shapes, points: pieces.flat()};
  };
  const finite = lines => lines.flatMap(line => line.values.filter(value => typeof value === "number"));

  const lines = ({title, unit, counted, logarithmic, lines, marks, notes: left}) => {
    const y = axisOf(finite(lines), unit, logarithmic), x = stepsAxis([...lines, ...marks]);
    const all = lines.map((line, index) => drawn(line, index, x, y));
    const steps = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b);
    // Each line is thinned by itself: where it has no point at this step, the nearest says its own.
    const nearest = ({steps, values}, step) => {
      const index = steps.reduce((best, one, at) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? at : best), 0);
      return write(values[index], unit) + (steps[index] === step ? "" : ` (${counted} ${write(steps[index], "count")})`);
    };
    const extreme = found => (found ? `${write(found[0], unit)} (${counted} ${write(found[1], "count")})` : "not finite");
    const excluded = marks.map(({kind, name, seconds}) => [kind, `${name}, left out: ${number(seconds)} s`]);
    const some = [...new Set(range(0, 11).map(index => steps[Math.round(index * (steps.length - 1) / 11)]))];
    const label = at => write(x.value(at), "count");
    const name = y.logarithmic ? `${title}, logarithmic` : title;
    const zero = y.logarithmic && finite(lines).includes(0) ? ["Values of 0 lie on the lower edge."] : [];
    return figure({
      kind: "lines", title: name, y, unit, grain: x.span,
      label: `${name}, over the ${counted}s. ${lines.map(line => `${line.name}: smallest ${extreme(line.smallest)}, largest ` +
        `${extreme(line.largest)}, last ${write(line.last, unit)}`).join("; ")}.${excluded.map(([, words]) => ` ${words}.`).join("")}`,
      marks: x.marks.map(value => [x.at(value), write(value, "count")]),
      ticks: (from, to) => [[from, label(from)], [to, label(to)]],
      shapes: [
        ...marks.flatMap(({kind, steps}) => steps.map(step =>
          svg("line", {class: `mark ${kind}`, x1: percent(x.at(step)), x2: percent(x.at(step)), y1: 0, y2: "100%"}))),
        ...all.flatMap(line => line.shapes),
      ],
      points: all.flatMap(line => line.points),
      stops: steps.map(step => ({
        at: x.at(step),
        words: () => [`${counted} ${write(step, "count")}`, ...lines.map(line => `${line.name}: ${nearest(line, step)}`)],
      })),
      below: [
        html("p", {class: "axis-name"}, counted),
        legend([
          ...lines.map((line, index) => [
            sample(svg("line", {class: `line line-${index}`, x1: 0, x2: 34, y1: 7, y2: 7})), `${line.name}: last ${write(line.last, unit)}`,
          ]),
          ...excluded.map(([kind, words]) => [sample(svg("line", {class: `mark ${kind}`, x1: 17, x2: 17, y1: 0, y2: 14})), words]),
        ]),
        ...notes([...left, ...zero]),
        behind(
          "As a table",
          name,
          table({
            caption: `${name}: extremes and medians`,
            heads: [["", ""], ...["smallest", "median", "largest", "last"].map(head => [head, unit])],
            rows: lines.map(line => statistics(line, unit, extreme)),
          }),
          table({
            caption: `${name}: some of the ${counted}s`,
            heads: [[counted, ""], ...lines.map(line => [line.name, unit])],
            rows: some.map(step => [write(step, "count"), ...lines.map(line => nearest(line, step))]),
          }),
        ),
      ],
    });
  };
  const statistics = (line, unit, extreme) =>
    [line.name, extreme(line.smallest), line.smallest ? write(line.median, unit) : "not finite", extreme(line.largest), write(line.last, unit)];

  const steps = ({count, median, p95, shares, steps}) => {
    const names = Object.keys(PARTS).filter(part => shares[part] > 0);
    const y = axisOf(steps.map(([, , duration]) => duration), "ms");
    const heads = [["batch", "count"], ["update", "count"], ...["time", ...Object.values(PARTS)].map(name => [name, "ms"])];
    const points = [];
    const shapes = steps.map(([, , , ...times], index) => {
      let start = 0;
      return svg("g", {}, Object.keys(PARTS).map((part, column) => {
        const [low, high] = [y.at(start), y.at(start += times[column])];
        if (high > low) points.push([index / steps.length, low], [index / steps.length, high]);
        const place = {x: percent(index / steps.length), y: percent(1 - high), width: percent(0.82 / steps.length), height: percent(high - low)};
        return high > low && svg("rect", {class: `part ${part}`, ...place});
      }));
    });
    const level = (value, kind) => svg("line", {class: kind, x1: 0, x2: "100%", y1: percent(1 - y.at(value)), y2: percent(1 - y.at(value))});
    const stops = steps.map((row, index) => ({
      at: (index + 0.41) / steps.length,
      words: () => heads.map(([name, unit], column) => `${name}: ${write(row[column], unit)}`).filter((_, column) => row[column] !== null),
      name: write(row[0], "count"),
    }));
    const named = some => some.map(({at, name}) => [at, name]);
    const line = kind => sample(svg("line", {class: kind, x1: 0, x2: 34, y1: 7, y2: 7}));
    return figure({
      kind: "steps", title: "Time of each batch", y, unit: "ms", grain: steps.length, points, stops,
      label: `Time of ${write(count, "count")} batches, each divided into ${Object.values(PARTS).join(", ")}. ` +
        `Median ${write(median, "ms")}, 95th percentile ${write(p95, "ms")}.`,
      marks: named(stops.filter((_, index) => index % Math.ceil(stops.length / 5) === 0)),
      ticks: (from, to) => {
        const seen = stops.filter(({at}) => at > from && at < to);
        return named(seen.length > 5 ? [seen[0], seen.at(-1)] : seen);
      },
      shapes: [...shapes, level(median, "mark"), level(p95, "mark dashed")],
      below: [
        html("p", {class: "axis-name"}, "batch"),
        legend(names.map(part => [box(part), PARTS[part]])),
        legend([[line("mark"), "median"], [line("mark dashed"), "95th percentile"]]),
        ...notes(steps.length < count
          ? [`${steps.length} of ${write(count, "count")} batches are drawn: the shortest and the longest of each span.`] : []),
        behind("As a table", "time of each batch", table({caption: "Time of each batch drawn", heads, rows: steps})),
      ],
    });
  };

  // Bars one below the other, along an axis of time, each with its name above.
  const lanes = ({title, lanes, kinds, heads, rows, note}) => {
    const x = axisOf(lanes.map(({boxes}) => boxes.reduce((sum, [, length]) => sum + length, 0)), "ms");
    const stops = [], around = [];
    const shapes = lanes.map(({name, apart, boxes}, index) => {
      // A name has the upper half.
      const place = {y: percent((index + 0.45) / lanes.length), height: percent(0.45 / lanes.length)};
      around.push(svg(
        "text",
        {class: `lane-name${apart ? " apart" : ""}`, x: 2, y: percent((index + 0.25) / lanes.length), dy: "0.35em"},
        name,
      ));
      let begin = 0;
      return svg("g", {}, boxes.map(([kind, length]) => {
        const left = x.at(begin), width = x.at(begin += length) - left;
        const shape = svg("rect", {class: `part ${kind}`, x: percent(left), width: percent(width), ...place});
        stops.push({at: left + width / 2, words: () => [`${name}, ${kind}: ${write(length, "ms")}`], shape});
        return shape;
      }));
    });
    const label = at => write(x.value(at), "ms");
    return figure({
      kind: "lanes", title, grain: 1000, stops, shapes, around,
      label: `${title}: ${lanes.length} lanes. ${note}`,
      rows: 2.4 * lanes.length,
      marks: x.marks.map(value => [x.at(value), write(value, "ms")]),
      ticks: (from, to) => [[from, label(from)], [to, label(to)]],
      below: [
        legend(kinds.map(kind => [box(kind), kind])),
        ...notes([note]),
        behind("As a table", title, table({caption: `${title}: all of them`, heads, rows})),
      ],
    });
  };

  const shares = ({shares}) => {
    let start = 0;
    const parts = Object.keys(PARTS).filter(part => shares[part] > 0);
    const words = part => `${PARTS[part]}: ${write(shares[part], "share")}`;
    return html(
      "figure",
      {class: "chart shares"},
      html("figcaption", {}, "Shares of the time of all batches"),
      svg("svg", {class: "bar", role: "img", "aria-label": `Shares of the time of all batches: ${parts.map(words).join("; ")}.`}, parts.map(part => {
        const x = percent(start);
        start += shares[part];
        return svg("rect", {class: `part ${part}`, x, y: 1, width: percent(shares[part]), height: 30}, svg("title", {}, words(part)));
      })),
      legend(parts.map(part => [box(part), words(part)])),
    );
  };

  const layers = ({title, unit, chart, lines: all, notes: left}) => {
    if (!chart) return html("section", {class: "layer"}, html("h3", {}, title), notes(left));
    const y = axisOf(finite(all), unit, true), x = stepsAxis(all);
    const extreme = found => (found ? `${write(found[0], unit)} (update ${write(found[1], "count")})` : "not finite");
    const heads = [["layer", ""], ["over the updates", ""], ...["smallest", "median", "largest", "last"].map(head => [head, unit])];
    const rows = all.map(line => {
      const [name, ...rest] = statistics(line, unit, extreme);
      return [name, svg("svg", {class: "sparkline", "aria-hidden": "true"}, drawn(line, 0, x, y).shapes), ...rest];
    });
    const listed = table({caption: `${title}: all layers, drawn on one scale`, heads, rows, class: "sparklines"});
    return html("section", {class: "layer"}, lines(chart), notes(left), behind("All layers", title, listed));
  };

  const facts = (pairs, kind) => html("dl", {class: kind}, pairs.map(([name, value, unit]) =>
    html("div", {}, html("dt", {}, name), html("dd", {}, breakable(write(value, unit))))));
  const BLOCKS = {
    table, lines, steps, lanes, shares, layers,
    text: block => html("p", {class: block.class || undefined}, say(block.text)),
    notes: block => html("ul", {class: "notes"}, block.notes.map(note => html("li", {}, note))),
    advice: block => html(
      "div",
      {class: "advice", role: "note"},
      html("p", {class: "what"}, breakable(say(block.text))),
      html("p", {class: "why"}, `Because: ${say(block.evidence)}`),
    ),
    charts: block => html("div", {class: "charts"}, block.blocks.map(blockOf)),
    window: block => html("section", {class: "window"}, html("h3", {}, block.title), block.blocks.map(blockOf)),
    facts: block => facts(block.facts, "facts"),
  };
  const blockOf = block => BLOCKS[block.type](block);

  const page = JSON.parse(document.getElementById("data").textContent);
  document.querySelector("main").replaceChildren(
    html("header", {}, html("h1", {}, page.title), html("p", {}, page.subtitle)),
    ...(page.headlines.length ? [facts(page.headlines, "headlines")] : []),
    ...(page.notes.length ? [BLOCKS.notes(page)] : []),
    ...page.sections.map(({id, title, blocks}) => html("section", {id}, html("h2", {}, title), blocks.map(blockOf))),
  );
}
