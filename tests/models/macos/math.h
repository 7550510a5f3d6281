/* As much of macOS's header as the compiled decoder uses, so that it can be compiled for macOS without one. */
#pragma once
#define INFINITY __builtin_inff()
double log(double);
double fabs(double);
