"use strict";
// Format numbers by the rules of tracking/numbers.py.
const stripped = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

function number(value, digits = 4, plainFrom = 1e-3) {
  if (value === null || value === undefined) return "-";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size !== 0 && (size < plainFrom || size >= 1e7)) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return `${stripped(mantissa)}e${Number(exponent)}`;
  }
  const [whole, part] = value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size || 1)))).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return part === undefined ? grouped : stripped(`${grouped}.${part}`);
}

const rate = (value) => number(value, 5, 1e-2);

function percent(share, digits = 4) {
  const value = 100 * share;
  if (value > 0 && value < 1e-3) return "< 0.001%";
  const text = number(value, digits, 0);
  return text === "100" && 1 - share > 1e-6 ? `> ${stripped(`99.${"9".repeat(digits - 2)}`)}%` : `${text}%`;
}

function scale(value) {
  const exponent = Math.log2(value);
  return value >= 1024 && Number.isInteger(exponent) ? `2^${exponent}` : number(value, 5);
}

function duration(seconds) {
  if (seconds < 100) return `${number(seconds, 3)} s`;
  const [whole, two] = [Math.round(seconds), (part) => String(Math.floor(part)).padStart(2, "0")];
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  return whole < 86400 ? `${Math.floor(whole / 3600)}h${two((whole % 3600) / 60)}m` : `${Math.floor(whole / 86400)}d${two((whole % 86400) / 3600)}h`;
}
