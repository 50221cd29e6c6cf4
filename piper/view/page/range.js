// The stretch of an axis that is in view. Several scenes may share one.

class Range {
  constructor(end, least) {
    this.end = Math.max(end, 1e-9);
    this.least = Math.min(least, this.end);
    this.low = 0;
    this.high = this.end;
    this.listeners = [];
  }

  get span() {
    return this.high - this.low;
  }

  get whole() {
    return this.span >= this.end * 0.9999;
  }

  set(low, high) {
    const span = Math.min(this.end, Math.max(this.least, high - low));
    const middle = (low + high) / 2;
    this.low = Math.max(0, Math.min(this.end - span, middle - span / 2));
    this.high = this.low + span;
    for (const listener of this.listeners) listener();
  }

  zoom(factor, at = (this.low + this.high) / 2) {
    const span = Math.min(this.end, Math.max(this.least, this.span * factor));
    const share = (at - this.low) / this.span;
    const low = Math.max(0, Math.min(this.end - span, at - share * span));
    this.set(low, low + span);
  }

  pan(distance) {
    this.set(this.low + distance, this.high + distance);
  }

  // Pan by a tenth, or to an end.
  go(direction) {
    const shift = { left: -0.1 * this.span, right: 0.1 * this.span, first: -this.end, last: this.end }[direction];
    if (shift) this.pan(shift);
  }

  fit() {
    this.set(0, this.end);
  }

  // Bring a stretch into view, with room around it.
  show(start, end) {
    if (start >= this.low && end <= this.high) return;
    const span = Math.max(this.span, (end - start) * 1.5);
    const middle = (start + end) / 2;
    this.set(middle - span / 2, middle + span / 2);
  }
}
