// Numbers, sizes and times as a person reads them.

const DASH = "–";

// The clock of the job, in seconds since 1970. `ahead`: of ours. `stopped`: the time of a stored page, which does not grow older.
export const jobClock = { ahead: 0, stopped: null, now: () => jobClock.stopped ?? Date.now() / 1000 + jobClock.ahead };

export function integer(value) {
  return value == null ? DASH : Math.round(value).toLocaleString("en");
}

export function decimal(value, digits = 4) {
  return value == null ? DASH : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// 12.3 M, for axes and tiles.
export function short(value) {
  if (value == null) return DASH;
  for (const [unit, name] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (Math.abs(value) >= unit) return trimmed(value / unit) + name;
  }
  return trimmed(value);
}

export function bytes(value) {
  if (value == null) return DASH;
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= unit) return `${decimal(value / unit, 1)} ${name}`;
  }
  return `${Math.round(value)} B`;
}

export function milliseconds(value) {
  return value == null ? DASH : `${decimal(value, value < 10 ? 2 : 1)} ms`;
}

export function percent(share, digits = 0) {
  return share == null ? DASH : `${(100 * share).toFixed(digits)} %`;
}

export function duration(seconds) {
  if (seconds == null) return DASH;
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const [d, h, m, s] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${s} s` : `${s} s`;
}

// How long ago a moment is, in whole seconds.
export function age(seconds) {
  const whole = Math.floor(Math.max(0, seconds));
  return whole < 1 ? "just now" : `${whole < 10 ? `${whole} s` : duration(whole)} ago`;
}

// A time of day, with its date unless it is today's.
export function clock(at) {
  if (at == null) return DASH;
  const date = new Date(1000 * at);
  return date.toDateString() === new Date(1000 * jobClock.now()).toDateString() ? date.toLocaleTimeString("en-GB") : stamp(at);
}

export function stamp(at) {
  const date = new Date(1000 * at);
  return `${date.toLocaleDateString("en-CA")} ${date.toLocaleTimeString("en-GB")}`;
}

function trimmed(value) {
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0 });
}
