from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0010_ticks_of_schedules")]

    operations = [
        migrations.AddField(
            model_name="heldjob",
            name="key",
            field=models.CharField(blank=True, max_length=255, null=True, verbose_name="key"),
        ),
        migrations.AddIndex(
            model_name="heldjob",
            index=models.Index(
                fields=["queue", "key", "rank", "id"],
                name="kjo_held_key_idx",
            ),
        ),
    ]
