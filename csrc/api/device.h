// What the launches ask of a device: read once, the values never change.
#pragma once

namespace narrowfloat {

struct Device {
  int multiprocessors;
  int capability;    // major x 10 + minor
  bool overlaps;     // a launch may start while the one before ends (from sm90 on)
  bool cooperative;  // a resident grid may meet at a barrier
};

Device device_of(int index);

}  // namespace narrowfloat
