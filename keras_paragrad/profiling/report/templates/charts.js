// Adds to charts: values at the pointer or the arrow keys, and zoom. Everything else is drawn without it.
"use strict";
{
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const whole = value => Math.round(value).toLocaleString("en-US");
  // A batch and the tenths of it that have passed.
  const passed = value => (Number.isInteger(value) ? value : Math.floor(10 * value) / 10).toLocaleString("en-US");
  const percent = value => `${100 * value}%`;

  const draw = (name, attributes, text = "") => {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    shape.textContent = text;
    return shape;
  };

  // The value at a height from 0 to 1, in the largest unit that it reaches.
  const valueAt = ({bottom, top, logarithmic, units}) => {
    const [low, high] = [Number(bottom), Number(top)];
    const scales = units.split("|").map(unit => unit.split(":"));
    return height => {
      const value = logarithmic === undefined ? low + height * (high - low) : low * (high / low) ** height;
      const [name, scale] = scales.findLast(([_, scale]) => Math.abs(value) >= scale) ?? scales[0];
      const part = Number((value / scale).toPrecision(3));
      if (!part) return "0";
      const plain = 1e-4 <= Math.abs(part) && Math.abs(part) < 1e6;
      const digits = plain ? part.toLocaleString("en-US", {maximumSignificantDigits: 3}) : part.toExponential();
      return name ? `${digits} ${name}`.replace(" %", "%") : digits;
    };
  };

  // A stop is where a chart has values: `at` is its place from 0 to 1, `words` what is there. Zoomed ranges begin and end
  // at multiples of 1 / `grain`, and `ticks` are the labels of one.
  const lineChart = (plot, {low, high, counted}) => {
    const span = high - low;
    const lines = [...plot.querySelectorAll("[data-steps]")].map(({dataset}) => {
      let step = 0;
      return {
        name: dataset.name,
        // Three digits are written, which a sum would lose.
        steps: dataset.steps.split(" ").map(gap => (step = Math.round(1000 * (step + Number(gap))) / 1000)),
        values: dataset.values.split("|"),
      };
    });
    // Each line is thinned by itself: where it has no point at this step, the nearest says its own.
    const nearest = ({name, steps, values}, step) => {
      const index = steps.reduce((best, one, at) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? at : best), 0);
      return `${name}: ${values[index]}${steps[index] === step ? "" : ` (${counted} ${passed(steps[index])})`}`;
    };
    const label = at => whole(Number(low) + at * span);
    return {
      grain: span,
      stops: [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b).map(step => ({
        at: (step - low) / span,
        words: () => [`${counted} ${passed(step)}`, ...lines.map(line => nearest(line, step))],
      })),
      ticks: (from, to) => [[from, label(from)], [to, label(to)]],
      // The points' places and heights.
      points: [...plot.querySelectorAll("polyline")].flatMap(line => line.getAttribute("points").split(" ").map(point => {
        const [x, y] = point.split(",").map(Number);
        return [x / 10000, 1 - y / 1000];
      })),
    };
  };

  const stepChart = plot => {
    const table = plot.closest("figure").querySelectorAll("details tr");
    const [heads, ...rows] = [...table].map(row => [...row.cells].map(cell => cell.textContent));
    const stops = rows.map((cells, index) => ({
      at: (index + 0.41) / rows.length,
      words: () => heads.map((head, column) => `${head}: ${cells[column]}`).filter((_, column) => cells[column]),
      name: cells[0],
    }));
    const some = shown => (shown.length > 5 ? [shown[0], shown.at(-1)] : shown);
    return {
      grain: rows.length,
      stops,
      ticks: (from, to) => some(stops.filter(({at}) => at > from && at < to)).map(({at, name}) => [at, name]),
      points: [...plot.querySelectorAll(".part")].flatMap(bar => {
        const [x, y, height] = ["x", "y", "height"].map(name => parseFloat(bar.getAttribute(name)) / 100);
        return [[x, 1 - y], [x, 1 - y - height]];
      }),
    };
  };

  const lanesChart = (plot, {low, high}) => {
    const label = at => `${Number((Number(low) + at * (high - low)).toPrecision(3))} ms`;
    return {
      grain: 1000,
      stops: [...plot.querySelectorAll(".part")].map(shape => {
        const words = shape.querySelector("title").textContent;
        const [left, width] = ["x", "width"].map(name => parseFloat(shape.getAttribute(name)) / 100);
        return {at: left + width / 2, words: () => [words], shape};
      }),
      ticks: (from, to) => [[from, label(from)], [to, label(to)]],
    };
  };

  const KINDS = {lines: lineChart, steps: stepChart, lanes: lanesChart};

  const enliven = plot => {
    const kind = Object.keys(KINDS).find(name => plot.closest("figure").classList.contains(name));
    const {grain, stops, ticks, points} = KINDS[kind](plot, plot.dataset);
    const words = points && valueAt(plot.dataset);
    const view = plot.querySelector(".view");
    const content = plot.querySelector(".content");
    const across = plot.querySelector(".across");
    const up = plot.querySelector(".up");
    const frame = plot.parentElement;
    const tip = frame.appendChild(document.createElement("p"));
    const reset = frame.appendChild(document.createElement("button"));
    const cursor = plot.appendChild(draw("line", {class: "cursor", y1: 0, y2: "100%"}));
    const selection = plot.appendChild(draw("rect", {class: "selection"}));
    const zoomed = plot.appendChild(draw("g", {}));
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
      const place = clamp((stop.at - from) / (to - from), 0, 1);
      tip.replaceChildren(...stop.words().map(words => Object.assign(document.createElement("span"), {textContent: words})));
      tip.hidden = false;
      const middle = plot.getBoundingClientRect().left - frame.getBoundingClientRect().left + place * plot.clientWidth;
      tip.style.left = place < 0.5 ? `${middle + 10}px` : "";
      tip.style.right = place < 0.5 ? "" : `${frame.clientWidth - middle + 10}px`;
      if (stop.shape) return stop.shape.classList.add("at");
      cursor.style.display = "";
      cursor.setAttribute("x1", percent(place));
      cursor.setAttribute("x2", percent(place));
    };
    const zoom = (first, last, low = 0, high = 1) => {
      const shown = current;
      hide();
      from = clamp(Math.floor(first * grain + 1e-6) / grain, 0, 1);
      to = clamp(Math.ceil(last * grain - 1e-6) / grain, 0, 1);
      if (to <= from) [from, to] = [0, 1];
      [bottom, top] = points && high - low > 1e-4 ? [clamp(low, 0, 1), clamp(high, 0, 1)] : [0, 1];
      const wide = from === 0 && to === 1, tall = bottom === 0 && top === 1, all = wide && tall;
      content.setAttribute("x", percent(-from / (to - from)));
      content.setAttribute("width", percent(1 / (to - from)));
      content.setAttribute("y", percent((top - 1) / (top - bottom)));
      content.setAttribute("height", percent(1 / (top - bottom)));
      view.classList.toggle("zoomed", !all);
      across.style.display = wide ? "" : "none";
      if (up) up.style.display = tall ? "" : "none";
      reset.hidden = all;
      const labels = wide ? [] : ticks(from, to);
      const heights = tall ? [] : [0, 0.5, 1];
      zoomed.replaceChildren(...heights.map(height => draw("text", {
        class: "tick",
        x: -8,
        y: percent(1 - height),
        dy: "0.35em",
        "text-anchor": "end",
      }, words(bottom + height * (top - bottom)))), ...labels.map(([at, words], index) => draw("text", {
        class: "tick",
        x: percent((at - from) / (to - from)),
        y: "100%",
        dy: "1.5em",
        "text-anchor": kind === "steps" ? "middle" : index ? "end" : "start",
      }, words)));
      if (shown && shown.at >= from && shown.at <= to) show(shown);
    };

    const place = event => {
      const box = plot.getBoundingClientRect();
      return from + clamp((event.clientX - box.left) / box.width, 0, 1) * (to - from);
    };
    const height = event => {
      const box = plot.getBoundingClientRect();
      return top - clamp((event.clientY - box.top) / box.height, 0, 1) * (top - bottom);
    };
    // The heights between which the points in sight are, with a margin.
    const fitted = () => {
      const seen = points.filter(([at]) => at >= from && at <= to).map(([_, height]) => height);
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
      selection.setAttribute("x", percent((left - from) / (to - from)));
      selection.setAttribute("width", percent((right - left) / (to - from)));
      selection.setAttribute("y", percent((top - high) / (top - bottom)));
      selection.setAttribute("height", percent((high - low) / (top - bottom)));
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
      const around = inside();
      const index = around.indexOf(current);
      const at = current ? current.at : (from + to) / 2;
      const half = (to - from) / 2;
      const keys = {
        ArrowRight: () => show(around[Math.min(index + 1, around.length - 1)]),
        ArrowLeft: () => show(around[Math.max(index - 1, 0)]),
        Home: () => show(around[0]),
        End: () => show(around.at(-1)),
        "+": () => zoom(at - half / 2, at + half / 2, bottom, top),
        "-": () => zoom(at - 2 * half, at + 2 * half, bottom, top),
        f: () => points && zoom(from, to, ...fitted()),
        Escape: () => zoom(0, 1),
      };
      if (!Object.hasOwn(keys, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });

    tip.className = "tip";
    tip.setAttribute("role", "status");
    reset.textContent = "whole range";
    reset.type = "button";
    reset.addEventListener("click", () => zoom(0, 1));
    plot.setAttribute("tabindex", "0");
    plot.setAttribute("aria-describedby", "keys");
    // The browser would show them too, over ours.
    plot.querySelectorAll("title").forEach(title => title.remove());
    zoom(0, 1);
  };

  document.querySelectorAll(".plot").forEach(enliven);
  document.getElementById("keys").hidden = false;
}
