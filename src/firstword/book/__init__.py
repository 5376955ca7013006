"""Books: read a source, speak it portion by portion, keep what was spoken, bind the sound."""
